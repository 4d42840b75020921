"""Drafters: what guesses tokens."""
