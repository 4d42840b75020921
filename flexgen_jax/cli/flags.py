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
    command: Function, heading: str | None, options: list[Callable[[Function], Function]]
) -> Function:
    for option in reversed(options):
        command = option(command) if heading is None else under(heading, option(command))
    return command


def sampling_options(command: Function) -> Function:
    """Adds the flags for the choice of each token to a command."""
    return _apply(
        command,
        None,
        [
            click.option(
                "--temperature",
                type=float,
                help="0: greedy. Default: the model's default, or 0.",
            ),
            click.option(
                "--top-k",
                type=int,
                help="Sample from the K most likely tokens; 0: all. Default: the model's default.",
            ),
            click.option(
                "--top-p",
                type=float,
                help="Sample from the most likely tokens with this total probability. Default: the "
                "model's default.",
            ),
        ],
    )


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
                help="Hugging Face folder, Hub id or GGUF file; default: a toy model of 5 million "
                "parameters.",
            ),
            click.option(
                "--dummy-weights",
                is_flag=True,
                help="Use random weights. --model is then a known shape such as facebook/opt-1.3b "
                "(see `flexgen-jax models`), or a folder.",
            ),
            click.option(
                "--dtype",
                type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                default=EngineOptions.dtype,
                show_default=True,
                help="Dtype of compute and storage; auto: the checkpoint's.",
            ),
            click.option(
                "--seed",
                type=click.IntRange(0),
                default=EngineOptions.seed,
                show_default=True,
                help="Random seed.",
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
                help="GPU memory budget, e.g. 16GB; default: the free memory.",
            ),
            click.option(
                "--host-memory",
                type=Size(),
                metavar="SIZE",
                help="RAM budget, e.g. 64GB; default: the free memory.",
            ),
            click.option(
                "--disk-space",
                type=Size(),
                metavar="SIZE",
                help="Disk budget, e.g. 1TB; default: the free space.",
            ),
            click.option(
                "--write-limit",
                type=Size(),
                metavar="SIZE",
                help="Limit on bytes written to disk per day, e.g. 200GB; policies that exceed it "
                "are rejected.",
            ),
            click.option(
                "--kv-store",
                type=Size(),
                metavar="SIZE",
                help="Keep the KV cache of prompts on disk, up to this size, e.g. 20GB; later "
                "requests with the same prefix reuse it.",
            ),
            click.option(
                "--kv-store-dir",
                type=click.Path(path_type=Path),
                help="Folder of --kv-store; default: ~/.cache/flexgen_jax/kv.",
            ),
            click.option(
                "--offload-dir",
                type=click.Path(path_type=Path),
                help="Folder on a fast disk for offloaded data; weights stay there for later runs."
                " Default: ~/.cache/flexgen_jax/offload.",
            ),
            click.option(
                "--stages",
                type=click.IntRange(1),
                default=EngineOptions.stages,
                show_default=True,
                help="Number of pipeline stages, each a process with its own GPU or share of "
                "cores; budgets apply to each.",
            ),
            click.option(
                "--coordinator",
                metavar="HOST:PORT",
                callback=lead_or_join,
                help="Listen here for stages on other machines (`flexgen-jax stage`). Under srun "
                "or mpirun, the first process leads.",
            ),
        ],
    )


def _as_int(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    return int(value) if value else None


def _bits_option(name: str, tensor_name: str) -> Callable[[Function], Function]:
    return click.option(
        f"--{name}-bits",
        type=click.Choice([str(bits) for bits in BITS]),
        callback=_as_int,
        help=f"Bits of {tensor_name}; 16 is the dtype itself. 4 bits: 28 % of the memory and "
        "traffic, at a small loss of quality.",
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
    return _placement_flags(_precision_flags(command))


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


def _precision_flags(command: Function) -> Function:
    return _apply(
        command,
        PRECISION,
        [
            _bits_option("weight", "weights"),
            click.option(
                "--requantize",
                is_flag=True,
                help="Allow --weight-bits for a checkpoint that is already quantized (FP8, GPTQ, "
                "...), at some loss of quality.",
            ),
            click.option(
                "--weight-format",
                type=click.Choice(list(WEIGHT_FORMATS)),
                help="Groups for --weight-bits: own (32 along the input, default) or paper (64 "
                "along the output, less accurate).",
            ),
            _bits_option("cache", "full blocks of the KV cache"),
            click.option(
                "--matmul-bits",
                type=click.Choice([str(bits) for bits in MATMUL_BITS]),
                callback=_as_int,
                help="8: matmul with 8-bit integers, at a small loss of quality. Faster on some "
                "CPUs: see the page on CPU kernels.",
            ),
            click.option(
                "--attention",
                type=click.Choice(list(ATTENTIONS)),
                help="Where to attend to KV cache that is not on the GPU. host: on the CPU; "
                "device: copy the cache; auto: the better one in a search.",
            ),
            click.option(
                "--attention-sparsity",
                type=float,
                metavar="F",
                help="In decoding, attend to this fraction of the tokens with the highest scores, "
                "e.g. 0.1, at a loss of quality.",
            ),
            click.option(
                "--prefill-chunk",
                type=click.IntRange(1),
                metavar="TOKENS",
                help="Tokens per prefill chunk. Smaller chunks need less memory and more passes "
                f"over the weights. Default: {Policy().prefill_chunk}, or less if a plan needs it.",
            ),
            click.option(
                "--draft",
                metavar="lookup|self-4bit|MODEL",
                help="Speculative decoding with drafts from lookup (repeated text), self-4bit (the"
                " model in 4 bits), or a smaller model.",
            ),
            click.option(
                "--draft-tokens",
                type=click.IntRange(1, MAX_DRAFT),
                metavar="K",
                help="With --draft, maximum number of draft tokens per pass. Default: "
                f"{DRAFT_TOKENS}.",
            ),
            click.option(
                "--prefix-sharing/--no-prefix-sharing",
                default=True,
                help="Compute common prefixes of prompts once.",
            ),
        ],
    )
