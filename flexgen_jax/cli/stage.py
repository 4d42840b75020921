"""`flexgen-jax stage`: one stage's process."""

from __future__ import annotations

import os

import click

from flexgen_jax.errors import UserError


@click.command()
@click.option("--join", required=True, metavar="HOST:PORT", help="The leader's --coordinator.")
@click.option("--number", type=click.IntRange(0), required=True, help="Which stage this is.")
def stage(join: str, number: int) -> None:
    """Compute one stage's layers, for a command on another machine.

    That command has --stages and --coordinator, and says what to run. The model must be at the same
    path here, and FLEXGEN_JAX_STAGE_KEY the same secret. Ends with that command.
    """
    from flexgen_jax.engine.stage_worker import KEY, parse_address, work

    key = os.environ.get(KEY)
    if not key:
        raise UserError(f"set {KEY} to the leader's secret first")
    work(parse_address(join), number, key)
