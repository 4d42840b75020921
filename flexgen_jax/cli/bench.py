"""`flexgen-jax bench`: one measured run on random prompts, and its report for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexgen_jax.cli.commands import Command
from flexgen_jax.cli.engine_flags import engine_options, open_llm
from flexgen_jax.cli.flags import model_options, policy_options
from flexgen_jax.cli.json_files import check_json, json_option, write_json
from flexgen_jax.errors import UserError
from flexgen_jax.offload.metrics import LINKS, PHASES

if TYPE_CHECKING:
    from flexgen_jax.engine.llm import LLM
    from flexgen_jax.engine.report import Report

SIGMA = 0.8
"""Spread of the logarithms of text lengths, as in logs of chats."""


@click.command(cls=Command)
@click.option("--prompt-len", default=128, show_default=True, help="Tokens per prompt.")
@click.option(
    "--max-tokens",
    "--gen-len",
    "gen_len",
    default=32,
    show_default=True,
    help="New tokens per prompt.",
)
@click.option(
    "--lengths",
    help="Different numbers of new tokens, up to --max-tokens: a FILE with one number per line, or"
    " lognormal:MEAN.",
    metavar="FILE|lognormal:MEAN",
)
@click.option(
    "--num-sequences",
    type=click.IntRange(1),
    help="Number of prompts; default: one batch group, which may be hundreds.",
)
@click.option(
    "--copies",
    is_flag=True,
    help="On a CPU, keep device and host memory separate and copy between them, as with a GPU.",
)
@click.option(
    "--breakdown",
    is_flag=True,
    help="Print the time of compute and I/O; measuring costs some speed.",
)
@click.option(
    "--warm-up",
    is_flag=True,
    help="Run twice and report the second run: the first touch of fresh memory can be slow.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all transfers and computations to FILE; open it at https://ui.perfetto.dev.",
    metavar="FILE",
)
@json_option
@model_options
@policy_options
def bench(
    prompt_len: int,
    gen_len: int,
    lengths: str | None,
    num_sequences: int | None,
    copies: bool,
    breakdown: bool,
    warm_up: bool,
    trace: Path | None,
    json_file: Path | None,
    **flags: Any,
) -> None:
    """Measure throughput, transfers and peak memory on random prompts.

    Compiling and loading weights are not timed. The first touch of fresh memory is, unless
    --warm-up is set.
    """
    check_json(json_file)
    unified = False if copies else None
    options = engine_options(
        flags, num_sequences or 1, unified=unified, trace=trace, breakdown=breakdown
    )
    with open_llm(options) as llm:
        report = run_bench(llm, prompt_len, gen_len, num_sequences, options.seed, warm_up, lengths)
        click.echo(bench_summary(report))
        if breakdown:
            click.echo("\n" + breakdown_table(report))
        write_json(json_file, report)


def run_bench(
    llm: LLM,
    prompt_len: int,
    gen_len: int,
    num_sequences: int | None,
    seed: int,
    warm_up: bool = False,
    lengths: str | None = None,
) -> Report:
    """Generates `gen_len` tokens after random prompts of `prompt_len` tokens; returns the report.

    With num_sequences None it runs one block of the policy. With `warm_up` it runs twice and
    reports the second run. lengths: see `text_lengths`; the engine knows only that a text has at
    most `gen_len` tokens.
    """
    import numpy as np

    from flexgen_jax.requests.sampling import SamplingParams

    llm.config.check_lengths(prompt_len, gen_len)
    if num_sequences is not None and num_sequences < 1:
        raise UserError(f"--num-sequences must be at least 1, not {num_sequences}")
    count = num_sequences or llm.block_sequences(prompt_len, gen_len)
    llm.warm_up(prompt_len, gen_len, count)
    if num_sequences is None:
        click.echo(
            f"flexgen-jax: {count} sequences of {prompt_len} + {gen_len} tokens, a block of the "
            "policy; --num-sequences asks for fewer",
            err=True,
        )
    generator = np.random.default_rng(seed)
    prompts = generator.integers(0, llm.config.vocab_size, (count, prompt_len)).tolist()
    params = SamplingParams.plain(gen_len)
    ends = text_lengths(lengths, count, gen_len, seed) if lengths is not None else [gen_len] * count
    for _ in range(1 + warm_up):
        llm.generate(prompt_token_ids=prompts, sampling_params=params, on_token=Ending(llm, ends))
    return llm.report()


class Ending:
    """Ends texts after the numbers of tokens in `ends`, as end tokens would."""

    def __init__(self, llm: LLM, ends: Sequence[int]) -> None:
        self._llm, self._left = llm, list(ends)

    def __call__(self, request_id: str, token: int) -> None:
        self._left[int(request_id)] -= 1
        if not self._left[int(request_id)]:
            self._llm.cancel(request_id)


def text_lengths(lengths: str, count: int, max_tokens: int, seed: int) -> list[int]:
    """Returns the tokens of `count` texts, each from 1 to `max_tokens`.

    lengths: "lognormal:MEAN", with a sigma of 0.8; or a file with a number in each line, which is
    used again and again. Raises `UserError` if it is neither.
    """
    import numpy as np

    name, _, mean = lengths.partition(":")
    if name == "lognormal" and mean.isdigit() and int(mean) > 0:
        drawn = np.random.default_rng(seed).lognormal(0, SIGMA, count)
        lengths_drawn = np.round(drawn / drawn.mean() * int(mean))
        return [int(n) for n in np.clip(lengths_drawn, 1, max_tokens)]
    try:
        lengths_read = [int(line) for line in Path(lengths).read_text().split()]
    except OSError as error:
        raise UserError(
            f"--lengths {lengths}: {error.strerror}; use a file, or lognormal:MEAN"
        ) from None
    except ValueError:
        lengths_read = []
    if not lengths_read or min(lengths_read) < 1:
        raise UserError(f"--lengths {lengths}: each line must have a number of tokens, at least 1")
    return [min(lengths_read[i % len(lengths_read)], max_tokens) for i in range(count)]


def bench_summary(report: Report) -> str:
    """Formats a run's report for people."""
    moved = ", ".join(f"{link} {n / 1e9:.2f} GB" for link, n in report["bytes"].items() if n)
    steps = max(1, report["decode_steps"])
    decoded = report["decode_bytes"].items()
    per_step = ", ".join(f"{link} {n / steps / 1e6:.2f} MB" for link, n in decoded if n)
    busy = ", ".join(
        f"{resource} {s:.1f} s" for resource, s in report["busy_s"].items() if s > 0.005
    )
    if "compute" not in report["busy_s"]:
        busy = f"{busy or 'not timed'} (use --breakdown to time compute and copies)"
    peaks = ", ".join(f"{tier} {n / 2**30:.2f} GiB" for tier, n in report["peak_bytes"].items())
    device_peak = report["device_peak_bytes"]
    device_note = (
        f" (the device reports {device_peak / 2**30:.2f} GiB)" if device_peak is not None else ""
    )
    drafts = report.get("drafts", {})
    guesses = ""
    if drafts.get("passes"):
        guesses = (
            f"\ndrafts: {drafts['guessed']} tokens in {drafts['passes']} passes, "
            f"{drafts['accepted']} accepted; {report['tokens_a_pass']:.2f} tokens per pass"
        )
    cached = report.get("cached_experts", {})
    experts_note = ""
    if any(cached.values()):
        share = cached["hits"] / (cached["hits"] + cached["misses"])
        experts_note = f"\nexperts: {100 * share:.0f} % of those that had to be copied were cached"
    return (
        f"{report['model']}, {report['num_sequences']} x ({report['prompt_len']} + "
        f"{report['gen_len']}) tokens, {report['dtype']}\n"
        f"generation {report['generation_throughput']:.2f} token/s "
        f"(prefill {report['prefill_s']:.2f} s, decode {report['decode_s']:.2f} s; "
        f"not counted: loading weights {report['init_s']:.1f} s, compiling "
        f"{report['compile_s']:.1f} s)\n"
        f"moved: {moved or 'nothing'}\nmoved per decode step: {per_step or 'nothing'}\n"
        f"busy: {busy}\npeak: {peaks}{device_note}{guesses}{experts_note}"
    )


def breakdown_table(report: Mapping[str, Any]) -> str:
    """Formats where the time of each phase went, as table 8 of the FlexGen paper does: busy
    seconds, and GB of transfers. Time that overlaps counts in every row, so the rows do not add
    up."""
    rows = [f"{'':34}{'prefill s':>10}{'GB':>8}{'GB/s':>6}  {'decode s':>10}{'GB':>8}{'GB/s':>6}"]
    total = [f"{report[f'{phase}_s']:10.2f}{'':14}" for phase in PHASES]
    rows.append(f"{'wall clock':34}{'  '.join(total)}")
    by_kind = {(r["resource"], r["content"], r["phase"]): r for r in report["breakdown"]}
    for resource, content in sorted({key[:2] for key in by_kind}, key=_row_order):
        cells = [_cell(by_kind.get((resource, content, phase))) for phase in PHASES]
        name = f"{resource.replace('_', ' ')}: {content}"
        rows.append(f"{name:34}{'  '.join(cells)}")
    other_seconds = [
        f"{max(0.0, report[f'{phase}_s'] - (report['any_busy_s'][phase] or 0.0)):10.2f}{'':14}"
        for phase in PHASES
    ]
    rows.append(f"{'other (nothing of these under way)':34}{'  '.join(other_seconds)}")
    return "\n".join(row.rstrip() for row in rows)


def _row_order(key: tuple[str, str]) -> tuple[int, str]:
    order = ("compute", "host_compute", *LINKS)
    return order.index(key[0]), key[1]


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return " " * 24
    seconds, gigabytes = row["busy_s"], row["bytes"] / 1e9
    if not gigabytes:
        return f"{seconds:10.2f}{'':14}"
    return f"{seconds:10.2f}{gigabytes:8.2f}{gigabytes / max(seconds, 1e-9):6.2f}"
