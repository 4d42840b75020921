"""Measures this machine, using the real stores and layer functions, for a `HardwareProfile`."""

from __future__ import annotations

import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import features, kernels_of_device
from flexgen_jax.machine.compute_probe import PREFILLS, ROWS, ComputeProbe, Sample, rate_of, timed
from flexgen_jax.machine.limits import (
    available_memory,
    detect_budgets,
)
from flexgen_jax.models.checkpoint import DummyWeights
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import known_shape
from flexgen_jax.models.spec import Formats
from flexgen_jax.offload.allocator import release_memory
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk.folder import DiskArray, OffloadFolder
from flexgen_jax.offload.executor import Batch, BlockRun
from flexgen_jax.offload.metrics import (
    Content,
    Metrics,
)
from flexgen_jax.offload.tiers import Memories, writable_view
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.hardware import HardwareProfile, Rate
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.plan import BlockPlan, BlockShape
from flexgen_jax.policy.policy import Policy
from flexgen_jax.version import __version__

MB = 1 << 20
DISK_SIZES = ((MB // 8, 64 * MB), (1 * MB, 128 * MB), (8 * MB, 3072 * MB))
"""Sizes in bytes of one array, and of all arrays written and read.

KV blocks of few tokens are small. The total is large because a virtual disk serves small amounts
from its host's memory, faster than the disk.
"""

ROOMY = 4
"""If less than this many times the total is free on the disk, only a twelfth of it is used."""

COPY_SIZES = (1 * MB, 8 * MB, 64 * MB)
SMALL_MEMORY = 3 << 30

Tell = Callable[[str], object]


def stages(dtype: str) -> int:
    """Returns how many times `measure` calls `tell`."""
    return 14 if multiplies_integers(dtype) else 12


def multiplies_integers(dtype: str) -> bool:
    """Returns whether products of 8-bit integers have a unit of their own here, and so another
    speed than products of floats that hold integers."""
    on_cpu = jax.devices()[0].platform == "cpu"
    return on_cpu and dtype == "bfloat16" and bool(features().int8)


def measure(dtype: str, offload_dir: Path, unified: bool, tell: Tell) -> HardwareProfile:
    """Profiles this machine for models of a dtype, in one to three minutes.

    offload_dir: where the disk is measured; tell: called with the name of each measurement before
    it begins.
    """
    started = time.perf_counter()
    on_cpu = jax.devices()[0].platform == "cpu"
    is_small = available_memory() < SMALL_MEMORY
    shape = known_shape("facebook/opt-1.3b" if on_cpu else "facebook/opt-6.7b")
    probe = ComputeProbe(shape, dtype, copies=2 if is_small else 6)
    try:
        tell("disk")
        disk_read, disk_write, page_cache = disk_rates(offload_dir)
        tell("copies between host and device")
        to_device, to_host = copy_rates()
        linear = {}
        for bits in (16, 8, 4):
            tell(f"products with {bits}-bit weights")
            # A program for few rows takes as long to compile as one for many.
            rows, prefills = (ROWS, PREFILLS) if bits != 8 else (ROWS[::2], PREFILLS[1:2])
            linear[bits] = probe.linear(bits, rows, prefills[:2] if is_small else prefills)
        linear_int8 = {}
        if multiplies_integers(dtype):
            for bits in (16, 4):
                tell(f"8-bit products with {bits}-bit weights")
                few = (ROWS[2::2], PREFILLS[1:2] if is_small else PREFILLS[1:])
                linear_int8[bits] = probe.linear(bits, *few, matmul_bits=8)
        tell("attention of prompts")
        prefill = probe.prefill_attention()
        device, host = {}, {}
        for bits in (16, 8, 4):
            tell(f"decode attention, {bits} bits")
            device[bits], host[bits] = probe.device_attention(bits), probe.host_attention(bits)
        tell("sparse attention and quantization")
        ranks = (probe.device_rank(), probe.host_rank())
        quantize = probe.quantize()
        tell("fixed costs of a step")
        split = float(np.median([probe.split_s(rows, 128) for rows in (4, 16)]))
        fixed = step_seconds(dtype)
        tell("reading while computing")
        drag, slowed = beside_computing(probe, offload_dir)
    finally:
        probe.close()
        del probe
        release_memory()
    budgets = detect_budgets(None, None, None, offload_dir, "", unified)
    return HardwareProfile(
        name="this machine",
        dtype=dtype,
        device_memory=budgets.device or 0,
        host_memory=budgets.host or 0,
        disk_space=budgets.disk or 0,
        unified=on_cpu,
        disk_read=disk_read,
        disk_write=disk_write,
        page_cache=page_cache,
        host_to_device=to_device,
        device_to_host=to_host,
        linear=linear,
        prefill_attention=prefill,
        device_attention=device,
        host_attention=host,
        quantize=quantize,
        device_rank=ranks[0],
        host_rank=ranks[1],
        step_s=fixed,
        split_s=split,
        drag=drag,
        slowed=slowed,
        linear_int8=linear_int8,
        sizes=kernels_of_device().sizes,
        about={
            "source": "measured",
            "seconds": round(time.perf_counter() - started, 1),
            "measured_at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "offload_dir": str(offload_dir),
            **machine_key(dtype),
        },
    )


def machine_key(dtype: str) -> dict[str, str]:
    """Returns the properties that a cached profile must share with this process."""
    device = jax.devices()[0]
    return {
        "host": platform.node(),
        "processor": f"{platform.machine()} {_cpu_name()} x{len(os.sched_getaffinity(0))}",
        "device": f"{device.platform} {device.device_kind}",
        "versions": " ".join(
            [f"flexgen-jax {__version__}"]
            + [f"{name} {version(name)}" for name in ("jax", "numba", "tensorstore")]
        ),
        "dtype": dtype,
        "units": str(features()),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def disk_rates(offload_dir: Path) -> tuple[Rate, Rate, Rate]:
    """Measures direct reads, writes and reads from the page cache, in byte/s by the size of an
    array."""
    folder = OffloadFolder(offload_dir)
    reads, writes, cached = [], [], []
    try:
        for size, total_bytes in DISK_SIZES:
            is_tight = shutil.disk_usage(offload_dir).free < ROOMY * total_bytes
            count = total_bytes // size // (12 if is_tight else 1)
            shape = (size // 2,)
            chunk = (min(size, 8 * MB) // 2,)
            buffer = _buffer(shape)
            buffer[:] = np.random.default_rng(0).integers(0, 65535, shape, np.uint16)
            arrays = [
                folder.scratch_array(f"profile-{size}-{i}", shape, chunk, np.dtype(np.uint16))
                for i in range(count)
            ]
            total = float(size * count)
            writes.append((float(size), total, _once(partial(_write_all, arrays, buffer))))
            read = partial(_read_all, arrays, buffer)
            read()  # written data is still on its way to the disk
            reads.append((float(size), total, timed(read, 2, 0.0, warm_up=0)))
            warm = [replace(array, direct=False) for array in arrays[: 128 * MB // size]]
            read = partial(_read_all, warm, buffer)
            cached.append((float(size), float(size * len(warm)), timed(read, 5)))
    finally:
        folder.clear_scratch()
        folder.close()
    # Small arrays may be few enough to come from the memory of a virtual disk's host.
    limit = reads[-1][1] / reads[-1][2].seconds
    reads = [(size, min(units, limit * s.seconds), s) for size, units, s in reads]
    return rate_of(reads), rate_of(writes), rate_of(cached)


def _buffer(shape: tuple[int, ...]) -> np.ndarray:
    """Returns host memory of 16-bit numbers as a run reads it from disk."""
    return writable_view(Memories(Watcher(Metrics())).host_array(shape, np.dtype(np.uint16)))


def _once(run: Callable[[], object]) -> Sample:
    started = time.perf_counter()
    run()
    return Sample(time.perf_counter() - started, 0.0)


def _write_all(arrays: list[DiskArray], data: np.ndarray) -> None:
    futures = [array.write(data) for array in arrays]
    for future in futures:
        future.result()


def _read_all(arrays: list[DiskArray], out: np.ndarray) -> None:
    futures = [array.read_into(out) for array in arrays]
    for future in futures:
        future.result()


def copy_rates() -> tuple[Rate, Rate]:
    """Measures copies between pinned memory and the device, to the device and back, in byte/s by
    size."""
    watcher = Watcher(Metrics())
    memories = Memories(watcher, unified=False)
    what: tuple[Content, str] = ("weights", "a copy to measure")
    there, back = [], []
    for size in COPY_SIZES:
        on_device = jnp.zeros(size, jnp.uint8)
        on_host = jax.block_until_ready(memories.to_host(on_device, *what))
        to_device = partial(memories.to_device, on_host, *what)
        to_host = partial(memories.to_host, on_device, *what)
        there.append((float(size), float(size), timed(to_device)))
        back.append((float(size), float(size), timed(to_host)))
    watcher.close()
    return rate_of(there), rate_of(back)


def step_seconds(dtype: str) -> float:
    """Measures the fixed seconds of a decode step: a model with next to nothing to compute runs in
    the real loop."""
    config = _tiny()
    policy = Policy(batch_size=2, num_batches=2)
    device, ledger, tokens = Device.create(config, Formats(dtype)), Ledger({}), 32
    shape = BlockShape((2, 2), (16, 16), tokens)
    plan = BlockPlan(config, dtype, policy, shape, device.memories.unified, device.sizes)
    try:
        weights = WeightStore(device, DummyWeights(config), plan.tiers, ledger)
        weights.place(lambda _: None)
        ids = np.ones((2, 16), np.int32)
        batches = [Batch(ids, np.zeros(2, np.int32)) for _ in range(2)]

        def run() -> None:
            BlockRun(device, weights, plan, batches, ledger, None, lambda *_: False).run()

        seconds = timed(run, repeat=3).seconds
        weights.close()
    finally:
        device.close()
    return seconds / (tokens * len(plan.spec.layers) * len(batches))


def _tiny() -> ModelConfig:
    return replace(
        known_shape("facebook/opt-125m"),
        hidden_size=64,
        embed_size=64,
        ffn_size=256,
        num_heads=2,
        num_layers=8,
        vocab_size=128,
    )


def beside_computing(probe: ComputeProbe, offload_dir: Path) -> tuple[dict[str, float], ...]:
    """Measures `drag` and `slowed` (see `HardwareProfile`) for direct reads and for reads from the
    page cache, each by the name of the link."""
    folder = OffloadFolder(offload_dir)
    drag, slowed = {}, {}
    try:
        shape, kind = (32 * MB // 2,), np.dtype(np.uint16)
        array = folder.scratch_array("profile-drag", shape, (8 * MB // 2,), kind)
        buffer = _buffer(shape)
        array.write(buffer).result()
        step = probe.step(16)
        alone = timed(step, repeat=15, at_least=0.5).seconds
        for name, source in (("disk_read", array), ("page_cache", replace(array, direct=False))):
            read = partial(_read_all, [source], buffer)
            idle = timed(read, 9, 0.3).seconds
            beside, busy = _together(step, read)
            slowed[name] = max(busy / idle, 1.0)
            # A second's worth of reading takes `slowed` seconds, each of which loses this share of
            # computing.
            drag[name] = slowed[name] * min(max(1 - alone / beside, 0.0), 1.0)
    finally:
        folder.clear_scratch()
        folder.close()
    return drag, slowed


def _together(compute: Callable[[], object], read: Callable[[], object]) -> tuple[float, float]:
    """Measures the seconds of computing and of reading while the other one goes on all the time."""
    done = threading.Event()
    reads: list[float] = []

    def reading() -> None:
        while not done.is_set():
            started = time.perf_counter()
            read()
            reads.append(time.perf_counter() - started)

    reader = threading.Thread(target=reading, daemon=True)
    reader.start()
    try:
        computed = timed(compute, repeat=25, at_least=1.0).seconds
    finally:
        done.set()
        reader.join()
    return computed, float(np.median(reads))
