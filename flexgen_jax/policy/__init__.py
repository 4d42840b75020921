"""Policies: where data lives, whether it fits, how long a run takes. No JAX, no I/O."""
