"""`flexgen-jax stage`: one stage's process."""

from __future__ import annotations

import os

import click

from flexgen_jax.errors import UserError

RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")
"""Environment variables with a process's rank: SLURM, Open MPI, other MPIs, and indexed jobs of
Kubernetes."""


def lead_or_join(
    _context: click.Context, _option: click.Parameter, coordinator: str | None
) -> str | None:
    """Returns the coordinator's address in the process that leads; any other that a launcher has
    started with the same command is a stage until that process ends."""
    number = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    if coordinator is not None and number.isdecimal() and int(number):
        be_stage(coordinator, int(number))
    return coordinator


def be_stage(address: str, number: int) -> None:
    """Computes the layers of a stage until the leader ends; raises `UserError` where that cannot
    begin."""
    from flexgen_jax.engine.stages.worker import KEY, parse_address, work

    key = os.environ.get(KEY)
    if not key:
        raise UserError(f"set the environment variable {KEY} to the leader's secret")
    work(parse_address(address), number, key)


@click.command()
@click.option(
    "--join", required=True, metavar="HOST:PORT", help="Address of the leader's --coordinator."
)
@click.option("--number", type=click.IntRange(0), required=True, help="Number of this stage.")
def stage(join: str, number: int) -> None:
    """Run one pipeline stage for a command on another machine.

    That command sets --stages and --coordinator. This machine needs the model at the same path and
    the same secret in FLEXGEN_JAX_STAGE_KEY. The stage ends with that command.
    """
    be_stage(join, number)
