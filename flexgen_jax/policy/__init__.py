"""What goes where, and whether it fits. Imports no JAX and does no I/O."""
