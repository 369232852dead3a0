"""Steps that must not be taken: what is looked at, what is kept of them, taking them again."""
