"""The flags that commands share, and the objects that are built from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flexgen_jax.cli.commands import Size, under
from flexgen_jax.cli.stage import lead_or_join
from flexgen_jax.engine.options import DRAFT_TOKENS, EngineOptions
from flexgen_jax.models.formats.known import WEIGHT_FORMATS
from flexgen_jax.models.formats.storage import BITS, MATMUL_BITS
from flexgen_jax.policy.policy import (
    ATTENTIONS,
    MAX_DRAFT,
    Policy,
)
from flexgen_jax.policy.schedules import SCHEDULES

Function = Callable[..., Any]
"""A function that is, or becomes, a command."""

MODEL, MEMORY, POLICY = "Model", "Memory and machines", "Policy: where data lies"
PRECISION, PLANNING = "Precision and attention", "Planning"
"""Headings of flags in --help."""


def _apply(
    command: Function, heading: str, options: list[Callable[[Function], Function]]
) -> Function:
    for option in reversed(options):
        command = under(heading, option(command))
    return command


def model_options(command: Function) -> Function:
    """Adds the flags for the model, its dtype and its budgets to a command."""
    return _model_flags(_memory_flags(command))


def _model_flags(command: Function) -> Function:
    return _apply(
        command,
        MODEL,
        [
            click.option(
                "--model",
                help="Hugging Face folder or hub id; default: a toy of 5 million parameters.",
            ),
            click.option(
                "--dummy-weights",
                is_flag=True,
                help="Random weights of a known shape, e.g. --model facebook/opt-1.3b; no files.",
            ),
            click.option(
                "--dtype",
                type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                default=EngineOptions.dtype,
                show_default=True,
                help="Compute and store in this type; auto: the checkpoint's.",
            ),
            click.option(
                "--seed",
                type=click.IntRange(0),
                default=EngineOptions.seed,
                show_default=True,
                help="Seed of all random numbers.",
            ),
            click.option(
                "--progress/--no-progress",
                default=None,
                help="Show a progress bar; default: on a terminal.",
            ),
        ],
    )


def _memory_flags(command: Function) -> Function:
    return _apply(
        command,
        MEMORY,
        [
            click.option(
                "--device-memory",
                type=Size(),
                metavar="SIZE",
                help="GPU memory to use, e.g. 16GB; default: what is free.",
            ),
            click.option(
                "--host-memory",
                type=Size(),
                metavar="SIZE",
                help="RAM to use, e.g. 64GB; default: what is free.",
            ),
            click.option(
                "--disk-space",
                type=Size(),
                metavar="SIZE",
                help="Disk space to use, e.g. 1TB; default: what is free.",
            ),
            click.option(
                "--write-limit",
                type=Size(),
                metavar="SIZE",
                help="What may be written to the disk a day, e.g. 200GB: writing wears an SSD. "
                "Plans that write more are not chosen, and refused if they are given.",
            ),
            click.option(
                "--kv-store",
                type=Size(),
                metavar="SIZE",
                help="Keep the KV cache of prompts and texts in so much of the disk, e.g. 20GB: "
                "requests that share a prefix with earlier ones, of any run, load it in place of "
                "computing it.",
            ),
            click.option(
                "--kv-store-dir",
                type=click.Path(path_type=Path),
                help="Folder of --kv-store; default: ~/.cache/flexgen_jax/kv.",
            ),
            click.option(
                "--offload-dir",
                type=click.Path(path_type=Path),
                help="Folder on a fast disk for what does not fit; default: "
                "~/.cache/flexgen_jax/offload. A model's weights stay there for later runs.",
            ),
            click.option(
                "--stages",
                type=click.IntRange(1),
                default=EngineOptions.stages,
                show_default=True,
                help="Divide the layers over so many processes of this machine, each with a GPU, "
                "or a share of the cores, of its own; budgets are each one's.",
            ),
            click.option(
                "--coordinator",
                metavar="HOST:PORT",
                callback=lead_or_join,
                help="Listen here for the stages of other machines, on which `flexgen-jax stage` "
                "runs; only the first stage is started on this one. Where srun, mpirun or the like "
                "runs this command on all machines, the first process leads, others are stages.",
            ),
        ],
    )


def _as_int(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    return int(value) if value else None


def _bits_option(name: str, what: str) -> Callable[[Function], Function]:
    return click.option(
        f"--{name}-bits",
        type=click.Choice([str(bits) for bits in BITS]),
        callback=_as_int,
        help=f"Keep {what} in this many bits per number; 16 is the dtype itself. 4 moves and "
        "stores 0.28 of the bytes and costs some quality.",
    )


def plan_options(command: Function) -> Function:
    """Adds the flags for the purpose of a plan, and for what it may choose, to a command."""
    return _apply(
        command,
        PLANNING,
        [
            click.option(
                "--hardware",
                metavar="NAME|FILE",
                help="Plan for a known machine (t4-16gb, rtx3090-24gb, a100-80gb, h200-141gb) or a "
                "profile's file; default: this machine.",
            ),
            click.option(
                "--prompt-len",
                type=click.IntRange(1),
                help="Tokens a prompt. Default: 512, or what the model's context leaves room for.",
            ),
            click.option(
                "--max-tokens",
                "--gen-len",
                "gen_len",
                default=32,
                show_default=True,
                help="New tokens for each.",
            ),
            click.option(
                "--num-sequences",
                type=click.IntRange(1),
                help="How many prompts there are; default: as many as are best.",
            ),
            click.option(
                "--prefix-len",
                type=click.IntRange(0),
                default=0,
                help="Tokens before those of --prompt-len that several prompts share.",
            ),
            click.option(
                "--num-prefixes",
                type=click.IntRange(1),
                default=1,
                help="With --prefix-len, how many different prefixes there are.",
            ),
            click.option(
                "--max-latency",
                type=click.FloatRange(0, min_open=True),
                metavar="SECONDS",
                help="A block of sequences must be finished in this time.",
            ),
            click.option(
                "--min-throughput",
                type=click.FloatRange(0, min_open=True),
                metavar="TOKEN/S",
                help="This is enough; then the plan of the lowest latency is chosen.",
            ),
            click.option(
                "--allow-compression",
                is_flag=True,
                help="The plan may keep weights and KV cache in 4 bits, which costs some quality.",
            ),
            click.option(
                "--allow-sparsity",
                type=click.FloatRange(0, 1, min_open=True),
                metavar="F",
                help="The plan may attend to this fraction of the tokens only, which costs "
                "some quality.",
            ),
            click.option(
                "--draft-accepted",
                type=click.FloatRange(0, 1),
                metavar="SHARE",
                help="With --draft, the share of guesses that are right if those before them are; "
                "default: what such texts are expected to have.",
            ),
            click.option(
                "--latency-curve",
                type=click.Path(dir_okay=False, path_type=Path),
                metavar="FILE",
                help="Draw throughput over latency to FILE (.png, .svg or .pdf), and print it.",
            ),
        ],
    )


def policy_options(command: Function) -> Function:
    """Adds the flags for a policy, where data lies and how a block of batches is walked, to a
    command."""
    return _placement_flags(_precision_flags(command))


def _placement_flags(command: Function) -> Function:
    by_name = "By name, in place of --percent: device=20,host=80"
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
                help="A policy as JSON, or what `plan --json` wrote; auto searches for the fastest "
                "one, unless a flag from --percent to --schedule, --no-overlap or --no-copy-ahead "
                "fixes it: then what no flag places is all on the GPU, in batches of 8 or fewer.",
            ),
            click.option(
                "--percent",
                nargs=6,
                type=float,
                metavar="WG WC CG CC HG HC",
                help="Percent of weights on GPU and CPU, of KV cache on GPU and CPU, of "
                "activations on GPU and CPU; the rest on disk.",
            ),
            click.option("--weights", metavar="SPLIT", help=by_name),
            click.option("--cache", metavar="SPLIT", help=by_name),
            click.option(
                "--activations",
                metavar="SPLIT",
                help=by_name,
            ),
            click.option("--batch-size", type=int, help="Sequences in a batch."),
            click.option(
                "--num-batches", type=int, help="Batches that are computed together, at most."
            ),
            click.option(
                "--schedule",
                type=click.Choice(list(SCHEDULES)),
                help="When batches enter: as soon as others have finished rows (continuous, the "
                "default), one a pass (diagonal), when all have left (zigzag), one by one (row).",
            ),
            click.option("--no-overlap", is_flag=True, help="Do not prefetch."),
            click.option(
                "--no-copy-ahead",
                is_flag=True,
                help="Copy a layer's weights to the GPU only when the one before is computed: it "
                "has room for one of hundreds of experts.",
            ),
        ],
    )


def _precision_flags(command: Function) -> Function:
    return _apply(
        command,
        PRECISION,
        [
            _bits_option("weight", "weights"),
            click.option(
                "--requantize",
                is_flag=True,
                help="Let --weight-bits round weights again that the model's files have in a few "
                "bits, such as FP8 or GPTQ; without it they stay as they are.",
            ),
            click.option(
                "--weight-format",
                type=click.Choice(list(WEIGHT_FORMATS)),
                help="With --weight-bits, quantize in groups of 32 along the input of each matrix "
                "(own, the default), or as the FlexGen paper does, 64 along the output: less good.",
            ),
            _bits_option("cache", "full blocks of the KV cache"),
            click.option(
                "--matmul-bits",
                type=click.Choice([str(bits) for bits in MATMUL_BITS]),
                callback=_as_int,
                help="8: layers multiply integers of 8 bits, to which hidden states are rounded. "
                "Costs a little quality. With --weight-bits 4 or 8, and with published weights of "
                "such bits, new tokens then take less time on CPUs without products "
                "of bfloat16 (AVX2, or AVX-512 alone); nothing changes on others. With "
                "--weight-format paper, prompts and large batches take less time on CPUs with AMX "
                "or VNNI.",
            ),
            click.option(
                "--attention",
                type=click.Choice(list(ATTENTIONS)),
                help="Where decoding attends to KV cache that is not on the GPU: on the host's "
                "CPU, or on the device, to which it is moved; auto: in a search the better "
                "one, else the host, unless the device is the CPU and attends to all tokens.",
            ),
            click.option(
                "--attention-sparsity",
                type=float,
                metavar="F",
                help="In decoding, each head attends to this fraction of the tokens before, those "
                "with the highest scores; e.g. 0.1. Reads and moves fewer values, and costs some "
                "quality; 1 is all.",
            ),
            click.option(
                "--prefill-chunk",
                type=click.IntRange(1),
                metavar="TOKENS",
                help="Longer prompts are computed in chunks of so many tokens, one a pass over the "
                "weights: fewer need less memory, and more passes. Default: "
                f"{Policy().prefill_chunk}, or less where a plan needs it.",
            ),
            click.option(
                "--draft",
                metavar="lookup|self-4bit|MODEL",
                help="Guess several tokens of each text, and have a pass over the weights check "
                "them all; the text stays the same. Where weights come from the host or the disk, "
                "few texts then take fewer passes. lookup: what followed the last tokens when "
                "they were in the text before, as in summaries, code and JSON; self-4bit: the "
                "model itself in 4 bits; or a smaller model with the same tokens. A model that "
                "guesses has to fit the GPU. A plan guesses only where that pays.",
            ),
            click.option(
                "--draft-tokens",
                type=click.IntRange(1, MAX_DRAFT),
                metavar="K",
                help=f"With --draft, guess so many tokens for a pass. Default: {DRAFT_TOKENS}.",
            ),
            click.option(
                "--prefix-sharing/--no-prefix-sharing",
                default=True,
                help="Whether prefixes that prompts share are found, and computed and kept once.",
            ),
        ],
    )
