"""What the command line says when something is wrong."""
