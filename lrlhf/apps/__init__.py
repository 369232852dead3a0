"""What reads, plans, serves and launches runs; training imports none of it."""
