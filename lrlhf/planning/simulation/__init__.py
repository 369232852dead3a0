"""A model of how long an iteration takes: generation event by event, then who waits for whom."""
