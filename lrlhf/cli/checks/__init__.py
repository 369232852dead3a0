"""What is known to be wrong with a run before weights are loaded, one function per check."""
