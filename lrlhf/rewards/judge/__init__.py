"""Rewards that a language model gives, asked with a rubric."""
