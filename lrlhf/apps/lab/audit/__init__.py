"""Audits of preference data and prompts: what is wrong with which rows."""

from lrlhf.apps.lab.audit.audit import Audit, audit
from lrlhf.apps.lab.audit.findings import Finding, FlaggedRow, Measure
from lrlhf.apps.lab.audit.report import as_json, as_page, as_text

__all__ = ["Audit", "Finding", "FlaggedRow", "Measure", "as_json", "as_page", "as_text", "audit"]
