"""The command line: parses flags, calls the library and prints. Wrong use gives one line and exit
status 2."""

from __future__ import annotations

import io
import sys
from typing import Any

import click

from flexgen_jax.cli.batch import Terminated, batch
from flexgen_jax.cli.bench import bench
from flexgen_jax.cli.convert import convert
from flexgen_jax.cli.eval import evaluate
from flexgen_jax.cli.generate import generate
from flexgen_jax.cli.models import models
from flexgen_jax.cli.plan import plan
from flexgen_jax.cli.profile import profile
from flexgen_jax.cli.stage import stage
from flexgen_jax.errors import StageError, UserError
from flexgen_jax.machine.jax_settings import set_up_jax
from flexgen_jax.version import __version__


class Commands(click.Group):
    """The group of commands, which reports wrong use in one line, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            click.echo(f"flexgen-jax: {error.format_message()} (see --help)", err=True)
            sys.exit(2)
        except (UserError, OSError, MemoryError) as error:
            click.echo(f"flexgen-jax: {error or type(error).__name__}", err=True)
            sys.exit(2)
        except StageError as error:
            click.echo(f"flexgen-jax: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt as error:
            click.echo(
                "flexgen-jax: interrupted; texts in --output are kept, weights too", err=True
            )
            sys.exit(143 if isinstance(error, Terminated) else 130)


@click.group(cls=Commands)
@click.version_option(__version__)
def main() -> None:
    """Generate text with language models larger than your GPU's memory.

    Weights, KV cache and activations are kept on the device, in host memory and on disk, and
    moved to where they are needed while the device computes.
    """
    set_up_jax()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show every text


for command in (batch, bench, convert, evaluate, generate, models, plan, profile, stage):
    main.add_command(command)
