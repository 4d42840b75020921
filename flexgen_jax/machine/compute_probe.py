"""Measures the speed of the real layer functions, for a `HardwareProfile`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import fmean, quantiles
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import (
    HostAttention,
    HostBlock,
    core_count,
    is_cpu,
    kernels_of_cpu,
    kernels_of_device,
)
from flexgen_jax.layers import programs
from flexgen_jax.layers.encoding import encoded
from flexgen_jax.layers.programs import Programs
from flexgen_jax.layers.quantization import Kept
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats, TensorSpec
from flexgen_jax.models.weight_source import numpy_dtype
from flexgen_jax.policy.hardware import Rate
from flexgen_jax.policy.policy import prompt_blocks

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Rows (sequences) of the decode steps that are measured."""

GPU_ROWS = (1, 4, 16, 64, 256)
"""The same for a GPU, which takes hardly longer for many rows than for one."""

HOST_ROWS = (1, 2, 4, 16)
"""The same for the CPU next to a GPU: many rows are computed on the GPU."""

PREFILLS = ((4, 128), (16, 128), (32, 128))
"""Sequences and tokens of the prefills that are measured, for products of many rows."""

PROMPTS = ((16, 128), (4, 512), (2, 1024))
"""Sequences and tokens of the prompts whose attention is measured: about the same rows in all, with
ever more attention."""

CACHES = ((4, 128), (16, 128), (16, 512), (16, 1024))
"""Sequences and tokens of the KV caches whose decode attention is measured."""

READ_BYTES = 1 << 30
"""Bytes that all cores read together to measure the rate of host memory: more than caches hold."""

BLOCK = 32
"""Tokens in a KV block of generated tokens."""


@dataclass(frozen=True)
class Sample:
    """The mean of some timings in seconds, and their interquartile range relative to the mean.

    The mean is used because a run takes the sum of its steps, including the disturbed ones.
    """

    seconds: float
    spread: float


def timed(
    run: Callable[[], Any],
    repeat: int = 7,
    at_least: float = 0.2,
    keep: int = 4,
    warm_up: int = 2,
) -> Sample:
    """Times a function: at least `repeat` runs and `at_least` seconds, after `warm_up` runs that do
    not count. The results of the last `keep` runs are kept, as a real run keeps its results."""
    results = deque([jax.block_until_ready(run()) for _ in range(warm_up)], maxlen=keep)
    samples: list[float] = []
    while len(samples) < repeat or sum(samples) < at_least:
        started = time.perf_counter()
        results.append(jax.block_until_ready(run()))
        samples.append(time.perf_counter() - started)
    lower_quartile, _, upper_quartile = quantiles(samples, n=4)
    return Sample(fmean(samples), (upper_quartile - lower_quartile) / fmean(samples))


def rate_of(points: Sequence[tuple[float, float, Sample]]) -> Rate:
    """Returns a rate, units per second by size, from points of (size, units, sample)."""
    ordered = sorted(points, key=lambda point: point[0])
    return Rate(
        tuple((size, units / sample.seconds) for size, units, sample in ordered),
        tuple(round(sample.spread, 3) for _, _, sample in ordered),
    )


class ProbedLayer:
    """The programs of one model's decoder layers in one dtype, and random arrays for them.

    copies: layers whose weights are used in turn; on_cpu: the CPU next to a GPU if its programs are
    measured, None for the programs of the device.
    """

    def __init__(
        self, config: ModelConfig, dtype: str, copies: int, on_cpu: jax.Device | None = None
    ) -> None:
        self.config, self.dtype, self._copies = config, dtype, copies
        self._on_cpu = on_cpu
        self._np = numpy_dtype(dtype)
        self._spec = model_spec(config)
        self._layer = self._spec.decoders[0]
        self._heads = self._layer.attention
        self._key = self._layer.growing[0]
        self._host = HostAttention(not is_cpu())
        self._attended: dict[tuple[int, int], Sample] = {}
        values = np.random.default_rng(0).standard_normal(1_000_003, np.float32)
        self._values = (0.05 * values).astype(self._np)

    @property
    def products(self) -> int:
        """Elements of a layer's kernel weights."""
        return self._layer.large_size

    def close(self) -> None:
        self._host.close()

    def _array(self, *shape: int) -> jax.Array:
        array: jax.Array = jax.device_put(np.resize(self._values, shape), self._on_cpu)
        return array

    def _hidden(self, batch: int, tokens: int) -> jax.Array:
        return self._array(*self._spec.hidden_shape(batch, tokens))

    def _weights(self, formats: Formats) -> list[dict[str, Kept]]:
        """Returns the weights of several layers, so that none is still in a cache when it is used
        again."""

        def kept(tensor: TensorSpec) -> Kept:
            return encoded(self._array(*tensor.shape), formats.weight(tensor))

        return [{t.path: kept(t) for t in self._layer.tensors} for _ in range(self._copies)]

    def _programs(self, formats: Formats) -> Programs:
        kernels = kernels_of_device() if self._on_cpu is None else kernels_of_cpu()
        return Programs(self.config, formats, kernels, self._on_cpu)


class ComputeProbe(ProbedLayer):
    """Measures the computations of a decoder layer."""

    def linear(
        self,
        bits: int,
        rows: Sequence[int],
        prefills: Sequence[tuple[int, int]],
        matmul_bits: int = 16,
    ) -> Rate:
        """Measures FLOP/s of a layer's products, norms included, by the number of rows.

        rows: of decode steps; prefills: sequences and tokens of prompts, whose attention is
        subtracted.
        """
        formats = Formats(self.dtype, weight_bits=bits, matmul_bits=matmul_bits, has_lanes=is_cpu())
        of_formats, layers = self._programs(formats), cycle(self._weights(formats))
        points = []
        for count in rows:
            step = self._products(of_formats, layers, count)
            points.append((float(count), 2.0 * count * self.products, timed(step)))
        for batch, tokens in prefills:
            whole, attention = (
                self._prefill(of_formats, layers, batch, tokens),
                self._causal(batch, tokens),
            )
            count = batch * tokens
            seconds = max(whole.seconds - attention.seconds, 0.5 * whole.seconds)
            sample = Sample(seconds, whole.spread)
            points.append((float(count), 2.0 * count * self.products, sample))
        return rate_of(points)

    def step(self, rows: int) -> Callable[[], Any]:
        """Returns a function that computes a decode step's products, each time with the next
        layer's weights."""
        formats = Formats(self.dtype)
        return self._products(self._programs(formats), cycle(self._weights(formats)), rows)

    def prefill_step(self, batch: int, tokens: int) -> Callable[[], Any]:
        """Returns a function that computes a prefill, each time with the next layer's weights."""
        formats = Formats(self.dtype)
        return self._prefills(self._programs(formats), cycle(self._weights(formats)), batch, tokens)

    def _prefills(
        self, of_formats: Programs, layers: Any, batch: int, tokens: int
    ) -> Callable[[], Any]:
        program = of_formats.get(
            programs.prefill, layer=self._layer, rows=batch, cuts=prompt_blocks(tokens, BLOCK)
        )
        further_arguments = (self._hidden(batch, tokens), _checks(), Rows.of(_first(batch), tokens))
        return lambda: program(next(layers), *further_arguments)

    def _ends_of_a_step(self, of_formats: Programs, rows: int) -> tuple[Any, Any]:
        """Returns the programs before and after decode attention in one place."""
        return (
            of_formats.get(programs.project, layer=self._layer, rows=rows),
            of_formats.get(programs.finish, layer=self._layer, rows=rows, places=1),
        )

    def _products(self, of_formats: Programs, layers: Any, rows: int) -> Callable[[], Any]:
        project, finish = self._ends_of_a_step(of_formats, rows)
        hidden, checks = self._hidden(rows, 1), _checks()
        partials, position_arguments = [self._partial(rows)], _where(rows, 1)

        def step() -> Any:
            weights = next(layers)
            return finish(
                weights, hidden, checks, *project(weights, hidden, *position_arguments), partials
            )

        return step

    def _partial(self, rows: int) -> tuple[jax.Array, jax.Array]:
        shape = self._heads.query_shape(rows)
        return jnp.zeros(shape), jnp.zeros(shape[:3])

    def _prefill(self, of_formats: Programs, layers: Any, batch: int, tokens: int) -> Sample:
        run = self._prefills(of_formats, layers, batch, tokens)
        return timed(run, repeat=5, at_least=1.5 if is_cpu() else 0.2, keep=8)

    def prefill_attention(self) -> Rate:
        """Measures FLOP/s of a prompt's attention, counted as 4 s^2 h1 per sequence, by its
        tokens."""
        points = []
        for rows, tokens in PROMPTS:
            if tokens <= self.config.max_positions:
                flops = self._heads.prefill_flops(rows, tokens)
                points.append((float(tokens), flops, self._causal(rows, tokens)))
        return rate_of(points)

    def _causal(self, rows: int, tokens: int) -> Sample:
        """Times a prompt's attention, once for each shape: the products of every width ask for
        it."""
        if (rows, tokens) not in self._attended:
            self._attended[rows, tokens] = self._timed_causal(rows, tokens)
        return self._attended[rows, tokens]

    def _timed_causal(self, rows: int, tokens: int) -> Sample:
        """Times a prompt's attention, from the projections as they come to the cache's keys and
        values."""
        heads = self._heads
        counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        sides = [self._array(rows, tokens, count, heads.head_dim) for count in counts]
        attend = partial(kernels_of_device().prefill_attention, spec=heads)
        program = jax.jit(attend).lower(*sides, _first(rows)).compile()
        return timed(partial(program, *sides, _first(rows)), repeat=5)

    def _blocks(
        self, formats: Formats, rows: int, tokens: int
    ) -> tuple[tuple[tuple[Kept, Kept], ...], tuple[int, ...], int]:
        """Returns sealed KV blocks and an open one, the sealed blocks' lengths, and the open
        one's."""
        lengths = prompt_blocks(tokens, BLOCK)
        blocks = []
        for length in lengths:
            storage = formats.sealed(self._key, rows, length)
            array = self._array(*storage.shape)
            blocks.append((encoded(array, storage), encoded(array + 1, storage)))
        tail = self._array(*self._key.array_shape(rows, BLOCK))
        return (*blocks, (tail, tail + 1)), lengths, BLOCK

    def device_attention(self, bits: int) -> Rate:
        """Measures decode attention on the device, in elements of keys and values per second."""
        formats, points = Formats(self.dtype, cache_bits=bits), []
        for rows, tokens in CACHES[1:3]:
            blocks, lengths, tail = self._blocks(formats, rows, tokens)
            program = self._programs(formats).get(
                programs.attend, layer=self._layer, rows=rows, blocks=lengths, tail=tail
            )
            query = self._array(*self._heads.query_shape(rows))
            starts = np.cumsum((0, *lengths)).astype(np.int32)
            where = (starts, *_where(rows, tokens + tail))
            elements = float(rows * (tokens + tail) * self._layer.row_size)

            def step(
                program: Any = program, query: Any = query, blocks: Any = blocks, where: Any = where
            ) -> Any:
                return program(query, blocks, *where)

            points.append((elements, elements, timed(step)))
        return rate_of(points)

    def device_rank(self) -> Rate:
        """Measures how fast the device computes scores and finds the largest, in scores per
        second."""
        formats = Formats(self.dtype)
        rows, tokens = CACHES[1]
        blocks, lengths, tail = self._blocks(formats, rows, tokens)
        program = self._programs(formats).get(
            programs.rank_tokens,
            layer=self._layer,
            rows=rows,
            blocks=lengths,
            tail=tail,
            room=(tokens + tail) // 10,
        )
        query = self._array(*self._heads.query_shape(rows))
        starts = np.cumsum((0, *lengths)).astype(np.int32)
        keys = tuple(key for key, _ in blocks)
        position_arguments = (starts, *_where(rows, tokens + tail))
        scores = float(rows * self._heads.num_heads * (tokens + tail))
        return rate_of([(scores, scores, timed(lambda: program(query, keys, *position_arguments)))])

    def host_attention(self, bits: int) -> Rate:
        """Measures decode attention by the CPU, in elements of keys and values per second."""
        points = [self._host_point(bits, *cache)[:2] for cache in CACHES]
        return rate_of([(elements, elements, sample) for elements, sample in points])

    def host_rank(self) -> Rate:
        """Measures how fast the CPU chooses the largest scores, in scores per second: the time that
        sparse attention takes besides reading."""
        rows, tokens = CACHES[2]
        elements, dense, query, blocks = self._host_point(16, rows, tokens)
        counts = np.full(rows, tokens // 10, np.int32)
        rank_arguments = (query, blocks, tokens + BLOCK, _first(rows), self._heads)
        sparse = timed(lambda: self._host.attend_top(*rank_arguments, counts, None, None))
        values_seconds = max(sparse.seconds - 0.55 * dense.seconds, 0.05 * sparse.seconds)
        scores = elements / 2 / self._heads.head_dim
        return rate_of([(scores, scores, Sample(values_seconds, sparse.spread))])

    def _host_point(self, bits: int, rows: int, tokens: int) -> Any:
        arrays, lengths, tail = self._blocks(Formats(self.dtype, cache_bits=bits), rows, tokens)
        starts = np.cumsum((0, *lengths))
        blocks = [
            HostBlock(int(start), jax.tree.map(np.array, block))
            for start, block in zip(starts, arrays, strict=True)
        ]
        query = np.resize(self._values, self._heads.query_shape(rows))
        first = _first(rows)
        elements = float(rows * (tokens + tail) * self._layer.row_size)
        sample = timed(lambda: self._host.attend(query, blocks, tokens + tail, first, self._heads))
        return elements, sample, query, blocks

    def split_s(self, rows: int, tokens: int) -> float:
        """Measures the extra seconds of a step with its cache on the host, over the sum of its
        parts."""
        formats = Formats(self.dtype)
        of_formats, layers = self._programs(formats), cycle(self._weights(formats))
        _, attended, _, blocks = self._host_point(16, rows, tokens)
        project, finish = self._ends_of_a_step(of_formats, rows)
        hidden, checks = self._hidden(rows, 1), _checks()
        first, position_arguments = _first(rows), _where(rows, tokens + BLOCK)

        def whole() -> Any:
            weights = next(layers)
            query, new_arrays = project(weights, hidden, *position_arguments)
            host_query = np.asarray(query)
            attended = self._host.attend(host_query, blocks, tokens + BLOCK, first, self._heads)
            return finish(weights, hidden, checks, query, new_arrays, [attended])

        alone = timed(self._products(of_formats, layers, rows)).seconds + attended.seconds
        extra_seconds: float = max(timed(whole).seconds - alone, 0.0)
        return extra_seconds

    def quantize(self) -> Rate:
        """Measures how fast full KV blocks are quantized, in elements per second."""
        formats, points = Formats(self.dtype, cache_bits=4), []
        for rows, tokens in ((4, 32), (16, 128)):
            program = self._programs(formats).get(
                programs.seal, layer=self._layer, rows=rows, tail=tokens
            )
            array = self._array(*self._key.array_shape(rows, tokens))
            elements = 2.0 * array.size
            points.append((elements, elements, timed(partial(program, (array, array)))))
        return rate_of(points)


def host_read_rate() -> float:
    """Measures how fast all cores read host memory together, in byte/s."""
    parts = np.array_split(np.ones(READ_BYTES // 8, np.uint64), core_count())
    with ThreadPoolExecutor(len(parts)) as pool:
        seconds = timed(lambda: [*pool.map(np.sum, parts)]).seconds
    return READ_BYTES / seconds


def _checks() -> jax.Array:
    """Returns the checks of a batch before any layer; see `layers.programs.table.CHECKS`."""
    return jnp.zeros(2, jnp.int32)


def _where(rows: int, position: int) -> tuple[np.int32, Rows]:
    """Returns a new token's position, and the rows of sequences without padding."""
    return np.int32(position), Rows.of(_first(rows), position)


def _first(rows: int) -> np.ndarray:
    """Returns first_valid, int32 [batch], for sequences that are valid from their first token."""
    return np.zeros(rows, np.int32)
