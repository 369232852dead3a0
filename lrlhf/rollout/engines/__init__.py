"""Engines that generate responses, and what they have in common."""
