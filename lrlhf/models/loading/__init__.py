"""How models, tokenizers and reward networks are read and written."""
