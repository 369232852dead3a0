"""Sources of rows, their order, and the loaders."""
