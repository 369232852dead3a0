"""Checkpoints of a run: when, which, how many."""
