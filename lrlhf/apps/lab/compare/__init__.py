"""Runs compared over the same prompts: is it better, by how much, or is it the seed?"""

from lrlhf.apps.lab.compare.comparison import RunComparison, compare_sides
from lrlhf.apps.lab.compare.page import print_report, write_comparison
from lrlhf.apps.lab.compare.report import Report, as_json, compare_runs

__all__ = [
    "Report",
    "RunComparison",
    "as_json",
    "compare_runs",
    "compare_sides",
    "print_report",
    "write_comparison",
]
