"""Requests: prompts, sampling, grammars, batches of them, and their results."""
