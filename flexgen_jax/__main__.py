"""The command `flexgen-jax`, which is also `python -m flexgen_jax`."""

from flexgen_jax.cli.interrupts import Interrupts


def main() -> None:
    """Runs the command line, with Ctrl-C handled before anything else is imported."""
    with Interrupts():
        from flexgen_jax.cli.main import main as command

        command()


if __name__ == "__main__":
    main()
