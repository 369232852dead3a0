"""The parts of a step on preference pairs."""
