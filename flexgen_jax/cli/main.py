"""The command line: parses flags, calls the library and prints. Wrong use gives one line and exit
status 2."""

from __future__ import annotations

import io
import sys

import click

from flexgen_jax.cli.batch import batch
from flexgen_jax.cli.bench import bench
from flexgen_jax.cli.chat import chat
from flexgen_jax.cli.commands import Commands, read_flag_defaults, set_loudness
from flexgen_jax.cli.convert import convert
from flexgen_jax.cli.eval import evaluate
from flexgen_jax.cli.generate import generate
from flexgen_jax.cli.models import models
from flexgen_jax.cli.plan import plan
from flexgen_jax.cli.profile import profile
from flexgen_jax.cli.serve import serve
from flexgen_jax.cli.stage import stage
from flexgen_jax.machine.jax_settings import set_up_jax
from flexgen_jax.version import __version__


@click.group(
    cls=Commands,
    context_settings={
        "show_default": True,
        "auto_envvar_prefix": "FLEXGEN_JAX",
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(__version__)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but results and errors.")
@click.option("-v", "--verbose", is_flag=True, help="Say more, such as the policy of each run.")
@click.pass_context
def main(context: click.Context, quiet: bool, verbose: bool) -> None:
    """Generate text with language models larger than your GPU's memory.

    Weights, KV cache and activations are spread over GPU, host memory and disk. Transfers overlap
    with compute.

    Flags can be set in ~/.config/flexgen_jax.toml, for all commands or in a table such as
    [generate], and by environment variables such as FLEXGEN_JAX_GENERATE_MODEL.
    """
    set_loudness(quiet, verbose)
    context.default_map = read_flag_defaults(main)
    set_up_jax()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show every text


for command in (
    batch,
    bench,
    chat,
    convert,
    evaluate,
    generate,
    models,
    plan,
    profile,
    serve,
    stage,
):
    main.add_command(command)
