"""The inspector: one page with the curves, responses and judged pairs of runs."""

from lrlhf.apps.lab.inspector.inspector import write_inspector

__all__ = ["write_inspector"]
