"""Evaluation of models: perplexity, and tasks of EleutherAI's lm-evaluation-harness."""
