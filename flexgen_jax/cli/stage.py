"""`flexgen-jax stage`: one stage's process, which another command starts."""

from __future__ import annotations

import os

import click

from flexgen_jax.errors import UserError


@click.command(hidden=True)
@click.option("--join", required=True, metavar="HOST:PORT", help="Where the leader listens.")
@click.option("--number", type=click.IntRange(0), required=True, help="Which stage this is.")
def stage(join: str, number: int) -> None:
    """Compute one stage's layers, as the process at HOST:PORT says."""
    from flexgen_jax.engine.stage_worker import work
    from flexgen_jax.engine.stages import KEY

    host, _, port = join.rpartition(":")
    key = os.environ.get(KEY)
    if not host or not port.isdigit() or key is None:
        raise UserError(f"--join {join}: give HOST:PORT, and the leader's key in {KEY}")
    work((host, int(port)), number, key)
