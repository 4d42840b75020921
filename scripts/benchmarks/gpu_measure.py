"""Measures what decides the speed of offloading on an accelerator, one line each, and writes JSON.

    python scripts/benchmarks/gpu_measure.py --json gpu.json      # on a GPU, about five minutes
    python scripts/benchmarks/gpu_measure.py --quick              # small, to see that it works

In this order: whether copies and computing overlap in a run with weights and KV cache on the host,
by the device's own trace, and the device's memory against the plan's, before anything else is on
the device; the links' rates for one large array, for a layer and for both directions at once; small
copies during a copy of a layer's weights; where pinned arrays begin; equal tokens in 16 bits. On a
CPU, host and device are kept apart, and the figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import device_trace
from flexgen_jax import LLM, Policy, SamplingParams, set_up_jax
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.offload.disk.direct_reads import PAGE
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.tiers import Memories, writable_view
from flexgen_jax.offload.watcher import Watcher

SMALL = 16 << 10
"""Bytes of a small copy, such as a batch's queries."""


@dataclass(frozen=True)
class Sizes:
    """What is measured: bytes of the large array, the model, and its workload."""

    array: int
    model: str
    rows: int
    batches: int
    prompt: int
    tokens: int


FULL = Sizes(2 << 30, "facebook/opt-6.7b", 32, 4, 256, 16)
QUICK = Sizes(64 << 20, "facebook/opt-125m", 4, 3, 32, 6)


def median_s(run: Callable[[], Any], repeat: int = 7) -> float:
    """Returns the median seconds of a function whose results are waited for."""
    run()
    found = []
    for _ in range(repeat):
        started = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - started)
    return float(np.median(found))


class Probe:
    """Copies between pinned memory and the device, as runs make them."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.memories = Memories(Watcher(Metrics()), unified=False)

    def host(self, shape: tuple[int, ...], dtype: Any = np.float16) -> jax.Array:
        return self.memories.host_array(shape, np.dtype(dtype))

    def up(self, tree: Any) -> Any:
        return self.memories.to_device(tree, "weights", "a copy to measure")

    def down(self, tree: Any) -> Any:
        return self.memories.to_host(tree, "cache", "a copy to measure")

    def layer(self) -> list[jax.Array]:
        """The large tensors of a decoder layer, on the host."""
        large = model_spec(known_shape(self.sizes.model)).decoders[0].large
        return [self.host(tensor.shape) for tensor in large]

    def links(self) -> dict[str, float]:
        """GB/s of the links."""
        there = self.host((self.sizes.array,), np.uint8)
        here = jax.block_until_ready(self.up(there))
        layer, total = self.layer(), there.nbytes
        parts = sum(array.nbytes for array in layer)
        both = median_s(lambda: (self.up(there), self.down(here)))
        return {
            "one array to the device, GB/s": total / median_s(lambda: self.up(there)) / 1e9,
            "one array to the host, GB/s": total / median_s(lambda: self.down(here)) / 1e9,
            "a layer to the device, GB/s": parts / median_s(lambda: self.up(layer)) / 1e9,
            "both directions at once, GB/s": 2 * total / both / 1e9,
        }

    def small_copies(self) -> dict[str, float]:
        """Milliseconds of a small copy alone, and right behind a layer's weights."""
        layer, few = self.layer(), np.zeros(SMALL, np.uint8)
        tick = jax.jit(lambda x: x + 1)

        def upload() -> Any:
            return jax.device_put(few, self.memories.device)

        def download() -> Any:
            found = tick(jnp.zeros(SMALL, jnp.uint8))
            found.copy_to_host_async()
            return np.asarray(found)

        found = {}
        for name, copy in (("upload", upload), ("download", download)):
            found[f"small {name} alone, ms"] = 1e3 * median_s(copy)

            def behind(copy: Callable[[], Any] = copy) -> float:
                weights = self.up(layer)
                started = time.perf_counter()
                jax.block_until_ready(copy())
                took = time.perf_counter() - started
                jax.block_until_ready(weights)
                return took

            behind()
            took = float(np.median([behind() for _ in range(7)]))
            found[f"small {name} behind a layer's weights, ms"] = 1e3 * took
        found["a layer's weights, ms"] = 1e3 * median_s(lambda: self.up(layer))
        return found

    def pinned(self) -> dict[str, Any]:
        """Share of pinned arrays of many sizes that begin at a page, and whether the device gets
        what the CPU writes to one."""
        shapes = [(n * 4096,) for n in (1, 3, 17, 400, 5000)] + [(n,) for n in (64, 1000, 12345)]
        arrays = [self.host(shape, np.uint8) for shape in shapes * 2]
        begun = [array.unsafe_buffer_pointer() % PAGE == 0 for array in arrays]
        view = writable_view(arrays[0])
        view[:] = 7
        is_seen = np.asarray(arrays[0]).ctypes.data == view.ctypes.data
        is_seen = is_seen and bool((np.asarray(self.up(arrays[0])) == 7).all())
        return {
            "pinned arrays that begin at a page, %": 100 * float(np.mean(begun)),
            "equal bytes after the CPU has written to pinned memory": is_seen,
        }


def overlap(sizes: Sizes) -> dict[str, Any]:
    """A run with weights and cache on the host, all cores attending: what its trace shows, and the
    device's memory against the plan's."""
    policy = Policy.from_percent(
        *(0, 100, 0, 100, 0, 100),
        batch_size=sizes.rows,
        num_batches=sizes.batches,
        attention="host",
    )
    options = {"dummy_weights": True, "policy": policy, "unified": False}
    with tempfile.TemporaryDirectory() as folder:
        with LLM(sizes.model, **options) as llm:
            rng = np.random.default_rng(0)
            shape = (sizes.rows * sizes.batches, sizes.prompt)
            prompts = rng.integers(4, 1000, shape).tolist()
            params = SamplingParams(max_tokens=sizes.tokens, ignore_eos=True)
            llm.generate(prompt_token_ids=prompts, sampling_params=params)
            with jax.profiler.trace(folder):
                llm.generate(prompt_token_ids=prompts, sampling_params=params)
            report = llm.report()
        spans = device_trace.read(Path(folder))
    found: dict[str, Any] = {
        "token/s": report["generation_throughput"],
        "run, s": report["total_s"],
        "planned device memory, GB": report["peak_bytes"]["device"] / 1e9,
        "the device's own count, GB": (report["device_peak_bytes"] or 0) / 1e9,
    }
    for kind, parts in sorted(spans.items()):
        found[f"{kind} by the trace, s"] = device_trace.seconds(parts)
    if "compute" in spans and "host_to_device" in spans:
        both = device_trace.seconds_together(spans["compute"], spans["host_to_device"])
        found["computing beside copies to the device, s"] = both
    return found


def equal_tokens(sizes: Sizes) -> dict[str, Any]:
    """Whether offloaded runs in 16 bits have the resident run's tokens, on the small model."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 4000, n).tolist() for n in rng.integers(4, 60, 12)]
    params = SamplingParams(max_tokens=sizes.tokens, ignore_eos=True)
    found: dict[str, Any] = {}
    for dtype in ("float16", "bfloat16"):
        runs = []
        for percent in ((100, 0, 100, 0, 100, 0), (0, 100, 0, 100, 0, 100)):
            policy = Policy.from_percent(
                *percent, batch_size=4, num_batches=3, attention="device", kv_block_tokens=8
            )
            with LLM(policy=policy, dtype=dtype, unified=False) as llm:
                results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
                runs.append([result.token_ids for result in results])
        found[f"equal tokens in {dtype}"] = runs[0] == runs[1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="Small sizes.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    set_up_jax()
    sizes = QUICK if args.quick else FULL
    device = jax.devices()[0]
    found: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
    print(f"{device.platform}: {device.device_kind}, jax {jax.__version__}", flush=True)
    _tell(found, overlap(sizes))
    probe = Probe(sizes)
    for measure in (probe.links, probe.small_copies, probe.pinned):
        _tell(found, measure())
    _tell(found, equal_tokens(sizes))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(not all(value for name, value in found.items() if name.startswith("equal")))


def _tell(found: dict[str, Any], more: dict[str, Any]) -> None:
    found |= more
    for name, value in more.items():
        print(
            f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True
        )


if __name__ == "__main__":
    main()
