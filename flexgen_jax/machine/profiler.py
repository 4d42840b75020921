"""Measures this machine, using the real stores and layer functions, for a `HardwareProfile`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import cpu_device, features, is_cpu, kernels_of_device
from flexgen_jax.machine.compute_probe import (
    GPU_ROWS,
    HOST_ROWS,
    PREFILLS,
    ROWS,
    ComputeProbe,
    host_read_rate,
    rate_of,
    timed,
)
from flexgen_jax.machine.disk_probe import DiskProbe
from flexgen_jax.machine.limits import available_memory, detect_budgets
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import read_config
from flexgen_jax.models.shapes import known_shape, raw_shape
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.models.weight_source import DummyWeights
from flexgen_jax.offload.allocator import release_memory, tune_allocator
from flexgen_jax.offload.batch import AllThere, Batch
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.executor import BlockRun
from flexgen_jax.offload.metrics import (
    Content,
    Metrics,
)
from flexgen_jax.offload.tiers import Memories
from flexgen_jax.offload.watcher import Watcher
from flexgen_jax.offload.weights import WeightStore
from flexgen_jax.policy.hardware import MEASURED, HardwareProfile, Rate
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.version import __version__

MB = 1 << 20
COPY_SIZES = (1 * MB, 8 * MB, 64 * MB)
SMALL_MEMORY = 3 << 30

Tell = Callable[[str], object]


def stages(dtype: str) -> int:
    """Returns how many times `measure` calls `tell`."""
    return 12 + 2 * multiplies_integers(dtype) + (not is_cpu())


def multiplies_integers(dtype: str) -> bool:
    """Returns whether products of 8-bit integers have a unit of their own here, and so another
    speed than products of floats that hold integers."""
    return is_cpu() and dtype == "bfloat16" and bool(features().int8)


def measure(dtype: str, offload_dir: Path, unified: bool, tell: Tell) -> HardwareProfile:
    """Profiles this machine for models of a dtype, in three to seven minutes.

    offload_dir: where the disk is measured, from time to time; tell: called with the name of each
    measurement before it begins.
    """
    started = time.perf_counter()
    on_cpu = is_cpu()
    is_small = available_memory() < SMALL_MEMORY
    shape = known_shape("facebook/opt-1.3b" if on_cpu else "facebook/opt-6.7b")
    probe = ComputeProbe(shape, dtype, copies=2 if is_small else 6)
    disk: DiskProbe | None = None
    try:
        tell("disk")
        disk = DiskProbe(offload_dir)

        def next_(what: str) -> None:
            tell(what)
            disk.read()

        next_("copies between host and device")
        to_device, to_host = copy_rates()
        linear = {}
        for bits in (16, 8, 4):
            next_(f"products with {bits}-bit weights")
            rows, prefills = _measured_rows(bits, on_cpu)
            linear[bits] = probe.linear(bits, rows, prefills[:2] if is_small else prefills)
        linear_int8 = {}
        if multiplies_integers(dtype):
            for bits in (16, 4):
                next_(f"8-bit products with {bits}-bit weights")
                few = (ROWS[2::2], PREFILLS[1:2] if is_small else PREFILLS[1:])
                linear_int8[bits] = probe.linear(bits, *few, matmul_bits=8)
        next_("attention of prompts")
        prefill = probe.prefill_attention()
        device, host = {}, {}
        for bits in (16, 8, 4):
            next_(f"decode attention, {bits} bits")
            device[bits], host[bits] = probe.device_attention(bits), probe.host_attention(bits)
        next_("sparse attention and quantization")
        ranks = (probe.device_rank(), probe.host_rank())
        quantize = probe.quantize()
        next_("fixed costs of a step")
        split = float(np.median([probe.split_s(rows, 128) for rows in (4, 16)]))
        fixed = step_seconds(dtype)
        host_linear, host_read = dict[int, Rate](), 0.0
        if not on_cpu:
            next_("products on the host")
            host_linear, host_read = products_on_host(dtype), host_read_rate()
        tell("reading while computing")
        contention = beside_computing(probe, disk)
        disk.settle()
        disk_rates = (disk.reads(), disk.writes(), disk.cached_reads())
    finally:
        probe.close()
        if disk is not None:
            disk.close()
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
        disk_read=disk_rates[0],
        disk_write=disk_rates[1],
        page_cache=disk_rates[2],
        disk_range=disk.range(),
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
        drag=contention["drag"],
        slowed=contention["slowed"],
        prefill_drag=contention["prefill_drag"],
        prefill_slowed=contention["prefill_slowed"],
        linear_int8=linear_int8,
        host_linear=host_linear,
        host_read=host_read,
        sizes=kernels_of_device().sizes,
        about={
            "source": MEASURED,
            "seconds": round(time.perf_counter() - started, 1),
            "measured_at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "offload_dir": str(offload_dir),
            **machine_key(dtype),
        },
    )


def products_on_host(dtype: str) -> dict[int, Rate]:
    """Measures the CPU's products next to a GPU, by bits of the weights; none where JAX has no CPU
    device."""
    cpu = cpu_device()
    if cpu is None:
        return {}
    with jax.default_device(cpu):
        probe = ComputeProbe(known_shape("facebook/opt-1.3b"), dtype, copies=4, on_cpu=cpu)
        try:
            return {bits: probe.linear(bits, HOST_ROWS, ()) for bits in (16, 8, 4)}
        finally:
            probe.close()


def measure_in_child(dtype: str, offload_dir: Path, unified: bool, tell: Tell) -> HardwareProfile:
    """Profiles this machine like `measure`, in a process of its own, whose memory is free when it
    has ended. Raises `OSError` if it fails."""
    code = f"from {__name__} import main; main({dtype!r}, {str(offload_dir)!r}, {unified})"
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    answer: dict[str, str] = {}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is this process's, which ends the child
    ) as child:
        assert child.stdout is not None, "it is a pipe"
        try:
            for line in child.stdout:
                answer = json.loads(line)
                if "stage" in answer:
                    tell(answer["stage"])
        except BaseException:
            child.kill()
            raise
    if "profile" not in answer:
        status = f"the process that measures ended with status {child.returncode}"
        raise OSError(answer.get("error", status))
    return HardwareProfile.from_json(answer["profile"])


def main(dtype: str, offload_dir: str, unified: bool) -> None:
    """Measures, and writes a line of JSON for each stage, and for the profile or an error."""

    def write(**content: str) -> None:
        sys.stdout.write(json.dumps(content) + "\n")
        sys.stdout.flush()

    tune_allocator(has_gpu=False)
    try:
        profile = measure(dtype, Path(offload_dir), unified, lambda name: write(stage=name))
        write(profile=profile.to_json())
    except (OSError, ValueError) as error:
        write(error=str(error))


def _measured_rows(bits: int, on_cpu: bool) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Returns the rows of decode steps, and the prefills, whose products are measured.

    A program for few rows takes as long to compile as one for many, and on a GPU, where XLA tries
    formulations of every product, much longer than it takes to measure.
    """
    if not on_cpu:
        return GPU_ROWS, PREFILLS[1:2]
    return (ROWS, PREFILLS) if bits != 8 else (ROWS[::2], PREFILLS[1:2])


def machine_key(dtype: str) -> dict[str, str]:
    """Returns the properties that a cached profile must share with this process."""
    device = jax.devices()[0]
    return {
        "host": platform.node(),
        "processor": f"{platform.machine()} {_cpu_name()} x{len(os.sched_getaffinity(0))}",
        "device": f"{device.platform} {device.device_kind}",
        "versions": " ".join(
            [f"flexgen-jax {__version__}"]
            + [f"{name} {version(name)}" for name in ("jax", "llvmlite", "tensorstore")]
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


def copy_rates() -> tuple[Rate, Rate]:
    """Measures copies between pinned memory and the device, to the device and back, in byte/s by
    size."""
    watcher = Watcher(Metrics())
    memories = Memories(watcher, unified=False)
    label: tuple[Content, str] = ("weights", "a copy to measure")
    there, back = [], []
    for size in COPY_SIZES:
        on_device = jnp.zeros(size, jnp.uint8)
        on_host = jax.block_until_ready(memories.to_host(on_device, *label))
        to_device = partial(memories.to_device, on_host, *label)
        to_host = partial(memories.to_host, on_device, *label)
        there.append((float(size), float(size), timed(to_device)))
        back.append((float(size), float(size), timed(to_host)))
    watcher.close()
    return rate_of(there), rate_of(back)


def step_seconds(dtype: str) -> float:
    """Measures the fixed seconds of a decode step: a model with next to nothing to compute runs in
    the real loop."""
    config = _tiny()
    device, ledger, tokens = Device.create(config, Formats(dtype)), Ledger({}), 32
    plan = BlockPlan(
        Setting(config, dtype, device.memories.unified, device.sizes),
        Policy(batch_size=2, num_batches=2),
        BlockShape((2, 2), (16, 16), tokens),
    )
    try:
        weights = WeightStore(device, DummyWeights(config), plan.tiers, ledger)
        weights.place(lambda _: None)
        ids = np.ones((2, 16), np.int32)
        batches = [Batch(ids, np.zeros(2, np.int32)) for _ in range(2)]

        def run() -> None:
            source = AllThere(plan, batches)
            for _ in BlockRun(device, weights, plan, source, ledger, None, lambda *_: None).run():
                pass

        seconds = timed(run, repeat=3).seconds
        weights.close()
    finally:
        device.close()
    return seconds / (tokens * len(plan.spec.layers) * len(batches))


def _tiny() -> ModelConfig:
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 8}
    return read_config({**raw_shape("facebook/opt-125m"), **sizes, **heads})


def beside_computing(probe: ComputeProbe, disk: DiskProbe) -> dict[str, dict[str, float]]:
    """Measures how reads and computing slow each other down, under two loads: a decode step, which
    wants memory, and a prefill, which wants the cores. Returns fields of `HardwareProfile`, each by
    the name of the link, for direct reads and for reads from the page cache."""
    rates: dict[str, dict[str, float]] = {}
    for prefix, load in (("", probe.step(16)), ("prefill_", probe.prefill_step(4, 128))):
        alone = timed(load, repeat=15, at_least=0.5).seconds
        drag, slowed = (
            rates.setdefault(f"{prefix}drag", {}),
            rates.setdefault(f"{prefix}slowed", {}),
        )
        for name in ("disk_read", "page_cache"):
            read = disk.reader(page_cached=name == "page_cache")
            idle = timed(read, 9, 0.3).seconds
            slowed_seconds, busy = _together(load, read)
            slowed[name] = max(busy / idle, 1.0)
            # One second of reading takes `slowed` seconds, and each of them loses this share of
            # computing.
            drag[name] = slowed[name] * min(max(1 - alone / slowed_seconds, 0.0), 1.0)
    return rates


def _together(compute: Callable[[], object], read: Callable[[], object]) -> tuple[float, float]:
    """Measures the seconds of compute during constant reading, and of reading during constant
    compute."""
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
