"""Measures how a GPU decodes a token in resident layers: one program a layer, several in one
program, by XLA's code and by this package's kernels.

    python scripts/benchmarks/gpu_layers.py --model facebook/opt-6.7b --rows 1 64 --json layers.json

Prints for each way the microseconds of a layer, those until it is dispatched, how long kernels run
and how many there are by the device's own trace, and the bytes of weights and cache that are read
in a second. Weights and caches are random, and those of several layers, so that none is still in
the GPU's cache. Takes a few seconds for each way, most of them compiling.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import device_trace
from flexgen_jax import set_up_jax
from flexgen_jax.gpu import DeviceKernels, GpuKernels
from flexgen_jax.layers import programs
from flexgen_jax.layers.programs import Programs
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.hardware import KernelSizes

TAIL = 32
"""Capacity of the open KV block in tokens."""

TIMES = 12
"""Tokens that are timed, after three that are not."""


class Way(NamedTuple):
    """One way to decode: bits of the weights, sequences, kernels, and whether layers are joined."""

    bits: int
    rows: int
    has_kernels: bool
    is_joined: bool

    def __str__(self) -> str:
        kernels = "kernels" if self.has_kernels else "XLA"
        program = "joined" if self.is_joined else "one by one"
        return f"{self.bits:2} bits, {self.rows:3} rows, {kernels:7}, {program}"


class Layers:
    """Random weights and caches of some layers of a model."""

    def __init__(self, model: str, count: int, context: int) -> None:
        self.config, self.count, self.context = known_shape(model), count, context
        self.layer = model_spec(self.config).decoders[0]
        rng = np.random.default_rng(0)
        self._floats = 0.02 * rng.standard_normal(1_000_003, np.float32)
        self._bytes = rng.integers(0, 127, 1_000_003, np.uint8)

    def filled(self, tree: Any) -> Any:
        """Returns arrays of random numbers for abstract ones."""

        def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            numbers = np.resize(self._floats if is_float else self._bytes, leaf.shape)
            array: jax.Array = jax.device_put(numbers.astype(leaf.dtype))
            return array

        return jax.tree.map(fill, tree)

    def token(self, way: Way, interprets: bool) -> tuple[Callable[[], jax.Array], int]:
        """Returns a function that decodes a token in all layers, and the bytes that it reads."""
        formats, sizes = Formats("float16", weight_bits=way.bits), KernelSizes.of_gpu()
        kernels = GpuKernels(sizes, interprets=interprets) if way.has_kernels else None
        of_formats = Programs(self.config, formats, kernels or DeviceKernels(sizes))
        shape = {"rows": way.rows, "blocks": (self.context,), "tail": TAIL}
        if way.is_joined:
            alike = (self.layer.index,) * self.count
            program = of_formats.get(programs.decode_joined, layers=alike, **shape)
        else:
            program = of_formats.get(
                programs.decode, layer=self.layer, **{**shape, "appends": True}
            )
        model = of_formats.traceable
        weights = [self.filled(model.weights(self.layer)) for _ in range(self.count)]
        caches = [
            self.filled(model.blocks(self.layer, way.rows, (self.context,)))
            for _ in range(self.count)
        ]
        tails = [self.filled(model.tail(self.layer, way.rows, TAIL)) for _ in range(self.count)]
        hidden, checks = self.filled(model.hidden(way.rows, 1)), jnp.zeros(2, jnp.int32)
        first, position = np.zeros(way.rows, np.int32), np.int32(self.context + 3)
        where = jax.device_put((position, Rows.of(first, position)))

        def joined() -> jax.Array:
            nonlocal hidden, checks, tails
            hidden, tails, checks = program(weights, hidden, caches, tails, checks, *where)
            return hidden

        def one_by_one() -> jax.Array:
            nonlocal hidden, checks
            for number in range(self.count):
                arguments = (weights[number], hidden, caches[number], tails[number], checks)
                hidden, tails[number], checks = program(*arguments, *where)
            return hidden

        read = sum(leaf.nbytes for leaf in jax.tree.leaves((weights, caches)))
        return joined if way.is_joined else one_by_one, read


def measured(layers: Layers, way: Way, interprets: bool) -> dict[str, Any]:
    """Returns a way's figures for a layer."""
    token, nbytes = layers.token(way, interprets)
    for _ in range(3):
        jax.block_until_ready(token())
    started = time.perf_counter()
    for _ in range(TIMES):
        result = token()
    dispatched = time.perf_counter() - started
    jax.block_until_ready(result)
    seconds = (time.perf_counter() - started) / TIMES
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(token())
        kernels = device_trace.read(Path(folder)).get("compute", [])
    return {
        "us": 1e6 * seconds / layers.count,
        "dispatch_us": 1e6 * dispatched / TIMES / layers.count,
        "kernels_us": 1e6 * device_trace.seconds(kernels) / layers.count,
        "kernels": len(kernels) / layers.count,
        "read_gb_s": nbytes / seconds / 1e9,
    }


def ways(bits: list[int], rows: list[int]) -> Iterator[Way]:
    for width in bits:
        for count in rows:
            yield Way(width, count, False, False)
            yield Way(width, count, False, True)
            yield Way(width, count, True, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="facebook/opt-6.7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=512, help="Tokens in the cache.")
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 64])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    set_up_jax()
    device = jax.devices()[0]
    interprets = device.platform == "cpu"
    print(f"{device.platform}: {device.device_kind}, jax {jax.__version__}, {args.model}")
    layers, found = Layers(args.model, args.layers, args.context), []
    for way in ways(args.bits, args.rows):
        figures = measured(layers, way, interprets)
        found.append({**way._asdict(), **figures})
        print(
            f"{way}: {figures['us']:8.1f} us, dispatched in {figures['dispatch_us']:6.1f}, "
            f"kernels {figures['kernels_us']:8.1f} ({figures['kernels']:.1f}), "
            f"{figures['read_gb_s']:6.0f} GB/s",
            flush=True,
        )
    if args.json:
        about = {"device": device.device_kind, "jax": jax.__version__, "model": args.model}
        args.json.write_text(json.dumps({**about, "ways": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
