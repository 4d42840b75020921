"""The command line, run in this process."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from flexgen_jax.cli.main import main


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
