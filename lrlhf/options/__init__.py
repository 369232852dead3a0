"""Options of classes, whether a command line, a config or Python gives them."""
