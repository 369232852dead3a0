"""What a run will need of memory."""
