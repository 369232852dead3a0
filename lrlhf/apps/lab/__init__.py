"""What is read off runs, models and data afterwards: pages, comparisons, audits."""

from lrlhf.apps.lab.run_files import RunFiles

__all__ = ["RunFiles"]
