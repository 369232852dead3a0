"""Rows without padding, and attention over them."""
