"""A model divided among processes."""
