"""Data sets that come ready-made."""
