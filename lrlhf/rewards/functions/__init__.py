"""Rewards that are computed from text."""
