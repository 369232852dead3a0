"""What is read off runs, models and data afterwards: pages, comparisons, audits."""

from lrlhf.analysis.run_files import RunFiles

__all__ = ["RunFiles"]
