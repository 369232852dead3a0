"""Audits of preference data and prompts: what is wrong with which rows."""

from lrlhf.apps.lab.audit.audit import Audit, as_json, as_page, as_text, audit
from lrlhf.apps.lab.audit.findings import Finding, FlaggedRow, Measure

__all__ = ["Audit", "Finding", "FlaggedRow", "Measure", "as_json", "as_page", "as_text", "audit"]
