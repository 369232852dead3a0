"""Rewards in processes of their own."""
