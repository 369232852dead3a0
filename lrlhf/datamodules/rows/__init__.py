"""From rows of data sets to tokens."""
