"""What modules report."""
