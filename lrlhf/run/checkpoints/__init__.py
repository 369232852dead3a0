"""Checkpoints as files and folders: written whole, verified, found again."""
