"""Measures one run on random prompts, and formats its report for people."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexgen_jax.engine.llm import LLM
from flexgen_jax.engine.sampling import SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.offload.metrics import LINKS, PHASES


def run_bench(
    llm: LLM,
    prompt_len: int,
    gen_len: int,
    num_sequences: int | None,
    seed: int,
    warm_up: bool = False,
) -> dict[str, Any]:
    """Generates `gen_len` tokens after random prompts of `prompt_len` tokens; returns the report.

    With num_sequences None it runs one block of the policy. With `warm_up` it runs twice and
    reports the second run.
    """
    llm.config.check_lengths(prompt_len, gen_len)
    if num_sequences is not None and num_sequences < 1:
        raise UserError(f"--num-sequences must be positive, not {num_sequences}")
    count = num_sequences or llm.block_sequences(prompt_len, gen_len)
    llm.warm_up(prompt_len, gen_len, count)
    generator = np.random.default_rng(seed)
    prompts = generator.integers(0, llm.config.vocab_size, (count, prompt_len)).tolist()
    params = SamplingParams(max_tokens=gen_len, ignore_eos=True)
    for _ in range(1 + warm_up):
        llm.generate(prompt_token_ids=prompts, sampling_params=params)
    return llm.report()


def bench_summary(report: dict[str, Any]) -> str:
    """Formats a run's report for people."""
    moved = ", ".join(f"{link} {n / 1e9:.2f} GB" for link, n in report["bytes"].items() if n)
    steps = max(1, report["decode_steps"])
    decoded = report["decode_bytes"].items()
    each = ", ".join(f"{link} {n / steps / 1e6:.2f} MB" for link, n in decoded if n)
    busy = ", ".join(f"{what} {s:.1f} s" for what, s in report["busy_s"].items() if s > 0.005)
    peaks = ", ".join(f"{tier} {n / 2**30:.2f} GiB" for tier, n in report["peak_bytes"].items())
    return (
        f"{report['model']}, {report['num_sequences']} x ({report['prompt_len']} + "
        f"{report['gen_len']}) tokens, {report['dtype']}\n"
        f"generation {report['generation_throughput']:.2f} token/s "
        f"(prefill {report['prefill_s']:.2f} s, decode {report['decode_s']:.2f} s; "
        f"placing weights {report['init_s']:.1f} s and compiling {report['compile_s']:.1f} s "
        f"not counted)\n"
        f"moved: {moved or 'nothing'}\nmoved for a token of every sequence: {each or 'nothing'}\n"
        f"busy: {busy}\npeak: {peaks}"
    )


def breakdown_table(report: dict[str, Any]) -> str:
    """Formats where the time of each phase went, as table 8 of the FlexGen paper does: busy
    seconds, and GB of transfers. Time that overlaps counts in every row, so the rows do not add
    up."""
    rows = [f"{'':34}{'prefill s':>10}{'GB':>8}{'GB/s':>6}  {'decode s':>10}{'GB':>8}{'GB/s':>6}"]
    total = [f"{report[f'{phase}_s']:10.2f}{'':14}" for phase in PHASES]
    rows.append(f"{'wall clock':34}{'  '.join(total)}")
    found = {(r["resource"], r["content"], r["phase"]): r for r in report["breakdown"]}
    for resource, content in sorted({key[:2] for key in found}, key=_row_order):
        cells = [_cell(found.get((resource, content, phase))) for phase in PHASES]
        name = f"{resource.replace('_', ' ')}: {content}"
        rows.append(f"{name:34}{'  '.join(cells)}")
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
