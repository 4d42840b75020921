"""A profile of this machine that is known in seconds: a generic one, corrected by a few rates."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import log
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import kernels_of_device
from flexgen_jax.machine.disk_probe import DiskProbe
from flexgen_jax.machine.profiler import copy_rates, machine_key
from flexgen_jax.offload.allocator import release_memory
from flexgen_jax.policy.hardware import ASSUMED, HardwareProfile, Rate
from flexgen_jax.policy.machines import generic_machine

MB = 1 << 20
DISK_SIZES = ((8 * MB, 384 * MB),)
"""Bytes of one array, and of all arrays that are written and read."""

MEMORY_BYTES = 128 * MB
"""Bytes read to measure memory: more than a processor's cache holds."""

COLUMNS, DEPTH = 4096, 2048
CPU_ROWS, GPU_ROWS = 512, 4096
"""Shape of the product that is measured, whose time is computing rather than reading."""

LAYER_SHARE = 0.6
"""Share of a single product's FLOP/s that the products of a layer reach."""

REPEATS = 3


def assumed_machine(dtype: str, offload_dir: Path, unified: bool) -> HardwareProfile:
    """Returns a generic profile corrected by measured rates of memory, of the disk, of a large
    product and, on a GPU, of copies. Takes two to five seconds.

    Decode steps of few rows are bound by memory and those of many rows by computing, so products
    between one row and `CPU_ROWS` or `GPU_ROWS` rows have a factor between both.
    """
    started = time.perf_counter()
    generic = generic_machine(unified)
    rows = CPU_ROWS if unified else GPU_ROWS
    disk = DiskProbe(offload_dir, DISK_SIZES, syncs=False)
    try:
        for _ in range(REPEATS):
            disk.read()
        disk_read, disk_write = disk.reads(), disk.writes()
    finally:
        disk.close()
    host_read = _host_read_rate()
    device_read = host_read if unified else _device_read_rate()
    flops = _product_rate(dtype, rows)
    memory = device_read / generic.linear[16].at(1)  # a weight: two bytes, two operations
    computing = LAYER_SHARE * flops / generic.linear[16].at(rows)

    def product(rate: Rate) -> Rate:
        def factor(size: float) -> float:
            share = min(log(max(size, 1.0)) / log(rows), 1.0)
            return float(memory ** (1 - share) * computing**share)

        return Rate(tuple((size, value * factor(size)) for size, value in rate.points))

    host = memory if unified else 1.0
    no_links = (generic.host_to_device, generic.device_to_host)
    to_device, to_host = no_links if unified else copy_rates()
    release_memory()
    return replace(
        generic,
        name="this machine, assumed",
        dtype=dtype,
        disk_read=disk_read,
        disk_write=disk_write,
        disk_range=disk.range(),
        host_to_device=to_device,
        device_to_host=to_host,
        page_cache=generic.page_cache.scaled(host),
        linear={bits: product(rate) for bits, rate in generic.linear.items()},
        prefill_attention=generic.prefill_attention.scaled(computing),
        device_attention={b: r.scaled(memory) for b, r in generic.device_attention.items()},
        host_attention={b: r.scaled(host) for b, r in generic.host_attention.items()},
        sizes=kernels_of_device().sizes,
        about={
            "source": ASSUMED,
            "seconds": round(time.perf_counter() - started, 1),
            "memory": f"{device_read / 1e9:.0f} GB/s",
            "products": f"{flops / 1e9:,.0f} GFLOP/s",
            "disk": f"{disk_read.points[-1][1] / 1e9:.1f} GB/s",
            **machine_key(dtype),
        },
    )


def _best_seconds(run: Callable[[], object]) -> float:
    """Returns the shortest time of some runs, after one that does not count."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _host_read_rate() -> float:
    """Returns the byte/s at which all cores together read host memory."""
    cores = len(os.sched_getaffinity(0))
    chunks = np.array_split(np.ones(MEMORY_BYTES // 8, np.int64), cores)
    with ThreadPoolExecutor(cores) as pool:
        return MEMORY_BYTES / _best_seconds(lambda: list(pool.map(np.bitwise_or.reduce, chunks)))


def _device_read_rate() -> float:
    """Returns the byte/s at which the device reads its memory."""
    array = jnp.ones(4 * MEMORY_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return array.nbytes / _best_seconds(lambda: jax.block_until_ready(total(array)))


def _product_rate(dtype: str, rows: int) -> float:
    """Returns the FLOP/s of a large product."""
    x, kernel = jnp.ones((rows, DEPTH), dtype), jnp.ones((COLUMNS, DEPTH), dtype)

    @jax.jit
    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        contracted = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x, kernel, contracted, preferred_element_type=jnp.float32)

    seconds = _best_seconds(lambda: jax.block_until_ready(multiply(x, kernel)))
    return 2 * rows * DEPTH * COLUMNS / seconds
