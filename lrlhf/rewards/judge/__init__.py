"""LLM as a judge: verdicts of a language model as rewards."""
