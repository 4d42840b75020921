"""`python -m flexgen_jax` is the command `flexgen-jax`."""

from flexgen_jax.cli.main import main

main()
