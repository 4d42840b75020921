"""`flexgen-jax profile`: measures this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexgen_jax.cli.json_files import check_json, json_option, write_json
from flexgen_jax.policy.hardware import HardwareProfile, Rate
from flexgen_jax.policy.policy import TIERS

if TYPE_CHECKING:
    from flexgen_jax.machine.product_probe import Product


@click.command()
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    help="Dtype of the models; auto: bfloat16 on a CPU, float16 on a GPU.",
)
@click.option(
    "--offload-dir",
    type=click.Path(path_type=Path),
    help="Folder on the disk to measure; default: the offload folder.",
)
@click.option("--progress/--no-progress", default=None, help="Show a progress bar.")
@json_option
def profile(
    dtype: str, offload_dir: Path | None, progress: bool | None, json_file: Path | None
) -> None:
    """Measure this machine: bandwidths, memory, matmul, attention, fixed costs.

    This takes three to seven minutes on two cores. `plan` and --policy auto use the result, unless
    the machine was too busy. Without it, plans use a generic profile that two seconds of
    measurements correct. On a CPU, a table compares this package's kernels with XLA's.
    """
    from flexgen_jax.cpu import is_cpu
    from flexgen_jax.machine.product_probe import time_products
    from flexgen_jax.machine.profiles import measured_profile, set_up
    from flexgen_jax.progress import Progress

    check_json(json_file)
    unified, folder = set_up(offload_dir)
    shown = Progress(sys.stderr.isatty() if progress is None else progress)
    default_dtype = "bfloat16" if unified else "float16"  # the default dtype of computation
    profile_dtype = default_dtype if dtype == "auto" else dtype
    measured = measured_profile(profile_dtype, folder, unified, shown)
    click.echo(profile_text(measured))
    if is_cpu() and profile_dtype == "bfloat16":
        click.echo(products_text(list(time_products())))
    write_json(json_file, json.loads(measured.to_json()))


def profile_text(profile: HardwareProfile) -> str:
    """Formats a profile for people: every figure with the spread of its samples."""
    lines = [f"{profile.name}, for models of {profile.dtype}"]
    lines += [f"  {key}: {value}" for key, value in profile.about.items()]
    for tier, nbytes in zip(
        TIERS, (profile.device_memory, profile.host_memory, profile.disk_space), strict=True
    ):
        lines.append(f"  {tier} memory: {nbytes / 1e9:.1f} GB")
    if profile.unified:
        lines.append("  device and host are the same RAM and the same cores")
    for title, rate, size, unit in _rates(profile):
        for index, (at, value) in enumerate(rate.points):
            spread = f"  +- {100 * rate.spread[index]:.0f} %" if rate.spread else ""
            name = title if index == 0 else ""
            lines.append(f"  {name:32} {_short(at):>7} {size:9} {value / 1e9:9.2f} {unit}{spread}")
    lines.append(f"  {'a step':32} {1e3 * profile.step_s:.2f} ms fixed")
    lines.append(f"  {'a step attended to by the CPU':32} {1e3 * profile.split_s:.2f} ms more")
    slowest, fastest = profile.disk_range
    lines.append(f"  disk read: {100 * slowest:.0f} to {100 * fastest:.0f} % of this over time")
    for link, phase in product(profile.drag, ("prefill", "decoding")):
        drag, times = profile.contention(link, phase == "prefill")
        lines.append(
            f"  {link.replace('_', ' ')} beside {phase}: {times:.2f} times as long, "
            f"and costs {100 * drag:.0f} % of its time alone of computing"
        )
    return "\n".join(lines)


def products_text(products: Sequence[Product]) -> str:
    """Formats a table of products; the faster code has a star."""
    lines = [f"  {'products with a large matrix, ms':41} this package   XLA's own code"]
    for timing in products:
        title = f"{timing.rows} row{'s' * (timing.rows > 1)}, {timing.bits}-bit weights"
        own_text = f"{1e3 * timing.own_s:12.2f}" if timing.own_s is not None else f"{'-':>12}"
        is_faster = timing.own_s is not None and timing.own_s <= timing.xla_s
        stars = ("*", " ") if is_faster else (" ", "*")
        lines.append(
            f"    {title:40} {own_text} {stars[0]} {1e3 * timing.xla_s:12.2f} {stars[1]}".rstrip()
        )
    lines.append("  a run takes this package's code where it has a time")
    return "\n".join(lines)


def _rates(profile: HardwareProfile) -> list[tuple[str, Rate, str, str]]:
    rows = [
        (name.replace("_", " "), getattr(profile, name), "bytes", "GB/s")
        for name in ("disk_read", "disk_write", "page_cache", "host_to_device", "device_to_host")
    ]
    rows += [
        (f"products, {bits}-bit weights", rate, "rows", "GFLOP/s")
        for bits, rate in profile.linear.items()
    ]
    rows += [
        (f"8-bit products, {bits}-bit weights", rate, "rows", "GFLOP/s")
        for bits, rate in profile.linear_int8.items()
    ]
    rows.append(("attention of a prompt", profile.prefill_attention, "tokens", "GFLOP/s"))
    for place, rates in (("device", profile.device_attention), ("host", profile.host_attention)):
        rows += [
            (f"{place} attention, {bits}-bit cache", rate, "elements", "Gelem/s")
            for bits, rate in rates.items()
        ]
    rows.append(("quantizing the cache", profile.quantize, "elements", "Gelem/s"))
    rows.append(("device top-k", profile.device_rank, "scores", "Gscore/s"))
    rows.append(("host top-k", profile.host_rank, "scores", "Gscore/s"))
    return rows


def _short(size: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{size / (1e3 if letter == 'k' else limit):.0f}{letter}"
    return f"{size:.0f}"
