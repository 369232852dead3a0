"""Rewards from services."""
