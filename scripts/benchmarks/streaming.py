"""Streams layers of OPT-1.3B's size from disk with `TieredParams`, compared with the disk's rate, a
loop of `numpy.memmap` and `jax.device_put`, and the engine.

    python scripts/benchmarks/streaming.py --memory 2GB --folder /ssd/off

Four passes through 24 layers: reading alone, computing alone with the same layers in memory, both,
and the loop. Overlapping work is hidden: (reading + computing - both) / the smaller of the two. As
root the run is held to a memory cgroup, and the page cache is dropped before each pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from disk_rate import read_rate
from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.offloading import Placement, TieredParams
from flexgen_jax.units import parse_bytes
from limits import drop_page_cache, inside

WIDTH, LAYERS = 2048, 24
SHAPES = {
    **dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH)),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}


def layer_of(seed: int) -> dict[str, np.ndarray]:
    """Returns random kernels in bfloat16, 100 MB."""
    draw = np.random.default_rng(seed)
    return {
        name: (0.02 * draw.standard_normal(shape, np.float32)).astype(jnp.bfloat16)
        for name, shape in SHAPES.items()
    }


@jax.jit
def apply(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Multiplies x, [token, width], by every kernel."""
    for name in ("query", "key", "value", "out"):
        x = x + x @ layer[name]
    return x + jax.nn.relu(x @ layer["up"]) @ layer["down"]


def timed(run: Callable[[], Any]) -> float:
    drop_page_cache()
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def through(params: TieredParams, x: jax.Array, computes: bool = True) -> jax.Array:
    for _, layer in params.stream():
        if computes:
            x = apply(layer, x)
    return x


def by_memmap(folder: Path, x: jax.Array) -> jax.Array:
    """The loop that comes to mind first."""
    for number in range(LAYERS):
        layer = {
            name: jax.device_put(
                np.memmap(folder / f"{number}.{name}", jnp.bfloat16, "r", shape=shape)
            )
            for name, shape in SHAPES.items()
        }
        x = apply(layer, x)
    return x


def of_engine(folder: Path) -> dict[str, float]:
    """Returns the engine's bytes read per second while decoding."""
    policy = Policy.from_percent(0, 0, 100, 0, 100, 0, batch_size=1)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"dummy_weights": True, "policy": policy, "offload_dir": folder}
    with LLM("facebook/opt-1.3b", dtype="bfloat16", **options) as llm:
        llm.warm_up(16, 9, 1)
        drop_page_cache()
        llm.generate(prompt_token_ids=[[5] * 16], sampling_params=params)
        report = llm.report()
    return {"bytes": report["bytes"]["disk_read"], "seconds": report["total_s"]}


def measure(folder: Path, tokens: int, turns: int) -> dict[str, Any]:
    """Returns the medians of all passes, in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(LAYERS):
        for name, array in layer_of(number).items():
            array.tofile(folder / f"{number}.{name}")
    x = jnp.ones((tokens, WIDTH), jnp.bfloat16)
    one = {name: jnp.asarray(array) for name, array in layer_of(0).items()}

    def alone() -> jax.Array:
        y = x
        for _ in range(LAYERS):
            y = apply(one, y)
        return y

    layers = ((str(n), layer_of(n)) for n in range(LAYERS))
    passes: dict[str, list[float]] = {}
    with TieredParams(layers, Placement(0.0, 0.0), folder=folder) as params:
        nbytes = params.nbytes["disk"]
        jax.block_until_ready(alone())
        for _ in range(turns):
            rate = read_rate(folder / "runs")
            for name, run in (
                ("reading", lambda: through(params, x, computes=False)),
                ("computing", alone),
                ("both", lambda: through(params, x)),
                ("memmap", lambda: by_memmap(folder, x)),
            ):
                passes.setdefault(name, []).append(timed(run))
            passes.setdefault("disk", []).append(nbytes / rate if rate else float("nan"))
    seconds = {name: statistics.median(each) for name, each in passes.items()}
    hidden = seconds["reading"] + seconds["computing"] - seconds["both"]
    return {
        "tokens": tokens,
        "bytes": nbytes,
        "seconds": seconds,
        "of_disk": statistics.median(
            disk / read for disk, read in zip(passes["disk"], passes["reading"], strict=True)
        ),
        "hidden": hidden / min(seconds["reading"], seconds["computing"]),
        "engine": of_engine(folder / "engine"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="of what lies on disk")
    parser.add_argument("--tokens", type=int, default=256, help="of x")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--memory", help="limit of a memory cgroup, as root")
    args = parser.parse_args()
    with inside(parse_bytes(args.memory)):
        print(json.dumps(measure(args.folder, args.tokens, args.turns), indent=1))


if __name__ == "__main__":
    main()
