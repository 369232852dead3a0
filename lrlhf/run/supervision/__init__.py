"""Deadlines, signals and lost processes of a run."""
