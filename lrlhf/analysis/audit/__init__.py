"""Audits of preference data and prompts: what is wrong with which rows."""

from lrlhf.analysis.audit.audit import Audit, audit
from lrlhf.analysis.audit.findings import Finding, Measure, RowToLookAt
from lrlhf.analysis.audit.report import as_json, as_page, as_text

__all__ = [
    "Audit",
    "Finding",
    "Measure",
    "RowToLookAt",
    "as_json",
    "as_page",
    "as_text",
    "audit",
]
