"""Statistics of evaluations: intervals, paired comparisons, and metrics over several samples."""
