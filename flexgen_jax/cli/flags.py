"""The flags that commands share, and the objects that are built from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from flexgen_jax.cli.commands import Size, under
from flexgen_jax.cli.stage import lead_or_join
from flexgen_jax.engine.options import MEMORY, MODEL, PRECISION, EngineOptions
from flexgen_jax.errors import UserError
from flexgen_jax.policy.schedules import SCHEDULES
from flexgen_jax.requests.sampling import SamplingParams

Function = Callable[..., Any]
"""A function that is, or becomes, a command."""

POLICY, PLANNING = "Policy: where data lies", "Planning"
"""Headings of flags in --help, besides those of `EngineOptions`."""


def _apply(
    command: Function, heading: str | None, options: list[Callable[[Function], Function]]
) -> Function:
    for option in reversed(options):
        command = option(command) if heading is None else under(heading, option(command))
    return command


SAMPLING = [entry for entry in fields(SamplingParams) if "text" in entry.metadata]
"""Sampling parameters that have a flag."""


def sampling_options(command: Function) -> Function:
    """Adds the flags for the choice of each token to a command."""
    options: list[Callable[[Function], Function]] = [
        click.option(
            "--" + entry.name.replace("_", "-"),
            type=int if "whole" in entry.metadata else float,
            help=entry.metadata["text"],
        )
        for entry in SAMPLING
    ]
    return _apply(command, None, options)


def sampling_params(flags: dict[str, Any], **params: Any) -> SamplingParams:
    """Takes the flags of `sampling_options` out of a command's flags, and returns the sampling
    parameters with `params`."""
    chosen = {entry.name: flags.pop(entry.name) for entry in SAMPLING}
    try:
        return SamplingParams(**chosen, **params)
    except ValueError as error:
        raise UserError(str(error)) from None


def model_options(command: Function) -> Function:
    """Adds the flags for the model, its dtype and its budgets to a command."""
    return _engine_flags(_engine_flags(command, MEMORY), MODEL)


def _engine_flags(command: Function, heading: str) -> Function:
    """Adds the flags of `EngineOptions` with a heading to a command."""
    entries = [entry for entry in fields(EngineOptions) if entry.metadata.get("heading") == heading]
    return _apply(command, heading, [_engine_flag(entry) for entry in entries])


def _engine_flag(entry: Field[Any]) -> Callable[[Function], Function]:
    flag, default = entry.metadata, entry.default
    name = "--" + entry.name.replace("_", "-")
    keywords: dict[str, Any] = {"help": flag["help"], "metavar": flag.get("metavar")}
    if flag.get("is_switch"):
        return click.option(f"{name}/--no-{name[2:]}", default=default or None, **keywords)
    if isinstance(default, bool):
        return click.option(name, is_flag=True, **keywords)
    if "choices" in flag:
        keywords["type"] = click.Choice([str(choice) for choice in flag["choices"]])
        if not isinstance(flag["choices"][0], str):
            keywords["callback"] = _as_int
    elif "minimum" in flag:
        keywords["type"] = click.IntRange(flag["minimum"], flag.get("maximum"))
    elif flag.get("type") == "size":
        keywords |= {"type": Size(), "metavar": "SIZE"}
    elif flag.get("type") == "path":
        keywords["type"] = click.Path(path_type=Path)
    else:
        keywords["type"] = flag.get("type")
    if flag.get("is_multiple"):
        return click.option(name, multiple=True, **keywords)
    if entry.name == "coordinator":
        keywords["callback"] = lead_or_join
    return click.option(name, default=default, show_default=default is not None, **keywords)


def _as_int(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    return int(value) if value else None


def plan_options(command: Function) -> Function:
    """Adds the flags for the purpose of a plan, and for what it may choose, to a command."""
    return _apply(
        command,
        PLANNING,
        [
            click.option(
                "--hardware",
                metavar="NAME|FILE",
                help="Plan for a known machine (t4-16gb, rtx4090-24gb, a100-80gb, h200-141gb) or a"
                " profile; default: this machine.",
            ),
            click.option(
                "--prompt-len",
                type=click.IntRange(1),
                help="Tokens per prompt. Default: 512, or less if the context is shorter.",
            ),
            click.option(
                "--max-tokens",
                "--gen-len",
                "gen_len",
                default=32,
                show_default=True,
                help="New tokens per prompt.",
            ),
            click.option(
                "--num-sequences",
                type=click.IntRange(1),
                help="Number of prompts; default: the number with the highest throughput.",
            ),
            click.option(
                "--prefix-len",
                type=click.IntRange(0),
                default=0,
                help="Tokens of a shared prefix, in addition to --prompt-len.",
            ),
            click.option(
                "--num-prefixes",
                type=click.IntRange(1),
                default=1,
                help="With --prefix-len, the number of different prefixes.",
            ),
            click.option(
                "--max-latency",
                type=click.FloatRange(0, min_open=True),
                metavar="SECONDS",
                help="Time limit for a batch group.",
            ),
            click.option(
                "--min-throughput",
                type=click.FloatRange(0, min_open=True),
                metavar="TOKEN/S",
                help="Choose the policy with the lowest latency that reaches this throughput.",
            ),
            click.option(
                "--allow-compression",
                is_flag=True,
                help="Allow 4-bit weights and KV cache, at a small loss of quality.",
            ),
            click.option(
                "--allow-sparsity",
                type=click.FloatRange(0, 1, min_open=True),
                metavar="F",
                help="Allow attention to this fraction of the tokens, at a loss of quality.",
            ),
            click.option(
                "--draft-accepted",
                type=click.FloatRange(0, 1),
                metavar="SHARE",
                help="With --draft, the acceptance rate of a guess; default: the rate of earlier "
                "runs.",
            ),
            click.option(
                "--latency-curve",
                type=click.Path(dir_okay=False, path_type=Path),
                metavar="FILE",
                help="Plot throughput over latency to FILE (.png, .svg or .pdf), and print it.",
            ),
        ],
    )


def policy_options(command: Function) -> Function:
    """Adds the flags for a policy, where data lies and how a block of batches is walked, to a
    command."""
    return _placement_flags(_engine_flags(command, PRECISION))


def _placement_flags(command: Function) -> Function:
    by_name = (
        "Percentages of {} on GPU (device) and CPU (host), e.g. device=20,host=50; the rest is on "
        "disk."
    )
    return _apply(
        command,
        POLICY,
        [
            click.option(
                "--policy",
                "policy_file",
                default="auto",
                show_default=True,
                metavar="auto|FILE",
                help="File with a policy, e.g. from `plan --json`. auto searches for the fastest; "
                "any flag below turns the search off.",
            ),
            click.option(
                "--percent",
                nargs=6,
                type=float,
                metavar="WG WC CG CC HG HC",
                help="Percentages of weights on GPU and CPU, KV cache on GPU and CPU, activations "
                "on GPU and CPU; the rest is on disk.",
            ),
            click.option("--weights", metavar="SPLIT", help=by_name.format("weights")),
            click.option("--cache", metavar="SPLIT", help=by_name.format("the KV cache")),
            click.option("--activations", metavar="SPLIT", help=by_name.format("activations")),
            click.option("--batch-size", type=int, help="Sequences per batch."),
            click.option(
                "--num-batches",
                type=int,
                help="Maximum number of batches that share each load of a layer's weights.",
            ),
            click.option(
                "--host-experts",
                type=click.FloatRange(0, 100),
                metavar="PERCENT",
                help="Of a layer's chosen experts that are not on the GPU, the percentage that the "
                "CPU computes instead of copying them; the default without a search is 0.",
            ),
            click.option(
                "--expert-cache",
                metavar="SIZE",
                help="GPU memory for copied experts of all layers, e.g. 4GB: those used last stay "
                "there.",
            ),
            click.option(
                "--schedule",
                type=click.Choice(list(SCHEDULES)),
                help="Batch admission. continuous (default): when rows are free; zigzag: a full "
                "group; diagonal: one per pass; row: one at a time.",
            ),
            click.option(
                "--no-overlap",
                is_flag=True,
                help="Do not overlap transfers with compute (no prefetching).",
            ),
            click.option(
                "--no-copy-ahead",
                is_flag=True,
                help="Copy a layer's weights to the GPU only after the previous layer, to save GPU"
                " memory.",
            ),
        ],
    )
