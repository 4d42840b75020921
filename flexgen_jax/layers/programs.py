"""The compiled functions: one per layer kind and shape, with the weights as an argument.

Programs are compiled ahead of time from abstract shapes, so compilation can be timed, done
before the first weight is loaded, and asked how much temporary memory it will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from flexgen_jax.layers.decoder import DecoderLayer, KVBlock
from flexgen_jax.layers.embedding import Embedding, Head
from flexgen_jax.layers.kernels import BY_XLA, Kernels
from flexgen_jax.layers.quantization import Kept, assemble, quantize_as
from flexgen_jax.layers.sampling import greedy, sample
from flexgen_jax.layers.sparse_attention import Ranked, attend_ranked, rank
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec import SCORED_ROWS, Formats, LayerSpec, model_spec, prefilled
from flexgen_jax.models.storage import Storage

Tail = tuple[jax.Array, jax.Array]
"""The open KV block, in full precision."""

Weights = Mapping[str, Kept]
"""A layer's tensors by path, e.g. "attention.q.kernel"."""


def _apply(module: Any, weights: Weights, *args: Any, **options: Any) -> Any:
    """The module's result with a layer's tensors as its parameters."""
    variables = {"params": unflatten_dict(dict(weights), sep=".")}
    return module.apply(variables, *args, **options)


def _embed(config: ModelConfig, dtype: jnp.dtype) -> Callable[..., Any]:
    def embed(weights: Weights, ids: jax.Array, start: jax.Array, first_valid: jax.Array) -> Any:
        hidden = _apply(Embedding(config, dtype), weights, ids, start, first_valid)
        return hidden, jnp.isfinite(hidden).all()

    return embed


def _prefill(
    config: ModelConfig,
    formats: Formats,
    kernels: Kernels,
    cuts: tuple[int, ...],
    only_last: bool,
) -> Callable[..., Any]:
    dtype = jnp.dtype(formats.dtype)

    def some(weights: Weights, hidden: jax.Array, first_valid: jax.Array) -> Any:
        """Hidden states of some sequences, the stored leaves of their blocks, and whether each
        of the former is finite, which is told while it is in the cache."""
        layer = DecoderLayer(config, dtype, kernels)
        hidden, (key, value) = _apply(
            layer, weights, hidden, first_valid, only_last=only_last, method="prefill"
        )
        blocks, start = [], 0
        for length in cuts:
            part = (slice(None), slice(None), slice(start, start + length))
            block = _seal(formats, (key[part], value[part]))
            blocks.append([jax.tree.leaves(side) for side in block])
            start += length
        return hidden, blocks, jnp.isfinite(hidden).all((1, 2))

    def prefill(weights: Weights, hidden: jax.Array, first_valid: jax.Array) -> Any:
        batch, tokens, _ = hidden.shape
        size = prefilled(batch, tokens, formats.weight_bits)
        found = _in_groups(partial(some, weights), size, hidden, first_valid)
        hidden, leaves, is_finite = found
        blocks = []
        for length, sides in zip(cuts, leaves, strict=True):
            storage = formats.kv((batch, config.num_heads, length, config.head_dim))
            blocks.append(tuple(assemble(storage, side) for side in sides))
        return hidden, tuple(blocks), is_finite.all()

    return prefill


def _in_groups(compute: Callable[..., Any], size: int, *arrays: jax.Array) -> Any:
    """`compute` of `size` rows at a time, one group after the other; its results joined."""
    count, rest = divmod(arrays[0].shape[0], size)
    if count == 1 and not rest:
        return compute(*arrays)
    cut = count * size
    groups = [_as_bits(x[:cut].reshape(count, size, *x.shape[1:])) for x in arrays]
    kinds = jax.eval_shape(compute, *(x[:size] for x in arrays))

    def one(group: list[jax.Array]) -> Any:
        found = compute(*map(_from_bits, group, arrays))
        return jax.tree.map(_as_bits, found)

    # XLA's CPU backend copies 16-bit floats from and to the joined arrays by way of fp32.
    found = jax.tree.map(_from_bits, jax.lax.map(one, groups), kinds)
    found = jax.tree.map(lambda x: x.reshape(cut, *x.shape[2:]), found)
    if not rest:
        return found
    last = compute(*(x[cut:] for x in arrays))
    return jax.tree.map(lambda first, second: jnp.concatenate([first, second]), found, last)


def _as_bits(x: jax.Array) -> jax.Array:
    """16-bit floats as integers."""
    if x.dtype.itemsize != 2:
        return x
    bits: jax.Array = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return bits


def _from_bits(x: jax.Array, like: Any) -> jax.Array:
    if x.dtype == like.dtype:
        return x
    floats: jax.Array = jax.lax.bitcast_convert_type(x, like.dtype)
    return floats


def _seal(formats: Formats, block: KVBlock) -> KVBlock:
    """A complete block as it is kept."""
    if formats.cache_bits == 16:
        return block
    key, value = (quantize_as(x, formats.kv(x.shape)) for x in block)
    return key, value


def _decode(
    config: ModelConfig, dtype: jnp.dtype, kernels: Kernels, most: int
) -> Callable[..., Any]:
    def decode(weights: Weights, *args: Any) -> Any:
        layer = DecoderLayer(config, dtype, kernels)
        hidden, new = _apply(layer, weights, *args, most=most, method="decode")
        return hidden, new, jnp.isfinite(hidden).all()

    return decode


def _project(config: ModelConfig, dtype: jnp.dtype, kernels: Kernels) -> Callable[..., Any]:
    def project(weights: Weights, hidden: jax.Array) -> Any:
        return _apply(DecoderLayer(config, dtype, kernels), weights, hidden, method="project")

    return project


def _finish(config: ModelConfig, dtype: jnp.dtype, kernels: Kernels) -> Callable[..., Any]:
    def finish(weights: Weights, *args: Any) -> Any:
        hidden = _apply(DecoderLayer(config, dtype, kernels), weights, *args, method="finish")
        return hidden, jnp.isfinite(hidden).all()

    return finish


def _append(tail: Tail, new: Tail, at: jax.Array) -> Tail:
    """Writes a token's key and value into the (donated) tail at index `at`."""
    key, value = (
        jax.lax.dynamic_update_slice_in_dim(into, x, at, axis=2)
        for into, x in zip(tail, new, strict=True)
    )
    return key, value


def _head(
    config: ModelConfig, dtype: jnp.dtype, kernels: Kernels, is_greedy: bool
) -> Callable[..., Any]:
    def head(weights: Weights, hidden: jax.Array, *sampling: jax.Array) -> Any:
        logits = _apply(Head(config, dtype, kernels.logits), weights, hidden[:, -1])
        ids = greedy(logits) if is_greedy else sample(logits, *sampling)
        return ids[:, None], jnp.isfinite(logits).all()

    return head


def _score(config: ModelConfig, dtype: jnp.dtype, kernels: Kernels) -> Callable[..., Any]:
    def score(weights: Weights, hidden: jax.Array, targets: jax.Array) -> Any:
        """Log-probability of each target at its position, fp32 [batch, token]."""

        def some(rows: jax.Array, wanted: jax.Array) -> jax.Array:
            logits = _apply(Head(config, dtype, kernels.logits), weights, rows)
            found = jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[:, None], axis=1)
            return found[:, 0]

        rows = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
        logprobs = _in_groups(some, min(SCORED_ROWS, targets.size), *rows)
        return logprobs.reshape(targets.shape), jnp.isfinite(logprobs).all()

    return score


def _int(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def compiler_options(formats: Formats) -> dict[str, str | bool] | None:
    """Of XLA's CPU backend: vectors as wide as the processor has them (prefill takes 5 % less), and
    where something is unpacked the order of the least memory.

    The usual order unpacks or rounds all of a layer before the first product, into memory that
    comes fresh from the system and is in no cache: 48 ms a step of OPT-1.3B in place of 18.
    """
    if jax.default_backend() != "cpu":
        return None
    options: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
    if (formats.weight_bits, formats.cache_bits, formats.matmul_bits) != (16, 16, 16):
        options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    return options


@lru_cache(maxsize=512)
def _compile(
    config: ModelConfig, formats: Formats, kernels: Kernels, kind: str, *shape: Any
) -> jax.stages.Compiled:
    lowered = _lower(config, formats, kernels, kind, *shape)
    return lowered.compile(compiler_options=compiler_options(formats))


def _lower(
    config: ModelConfig, formats: Formats, kernels: Kernels, kind: str, *shape: Any
) -> jax.stages.Lowered:
    dtype, kernels = jnp.dtype(formats.dtype), kernels.multiplying(formats.matmul_bits)

    def array(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    def kept(storage: Storage) -> Any:
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in storage.leaves]
        return assemble(storage, leaves)

    def kv_shape(batch: int, tokens: int) -> tuple[int, ...]:
        return batch, config.num_heads, tokens, config.head_dim

    def tail(batch: int, tokens: int) -> tuple[Any, Any]:
        return (array(*kv_shape(batch, tokens)),) * 2

    def block(batch: int, tokens: int) -> tuple[Any, Any]:
        return (kept(formats.kv(kv_shape(batch, tokens))),) * 2

    def weights(layer: LayerSpec) -> dict[str, Any]:
        return {t.path: kept(formats.weight(t)) for t in layer.tensors}

    layers = model_spec(config)
    batch = shape[0]
    args: tuple[Any, ...]
    if kind == "embed":
        tokens = shape[1]
        args = (weights(layers[0]), _int(batch, tokens), _int(), _int(batch))
        return jax.jit(_embed(config, dtype)).lower(*args)
    if kind == "prefill":
        cuts, only_last = shape[1:]
        args = (weights(layers[1]), array(batch, sum(cuts), config.hidden_size), _int(batch))
        return jax.jit(_prefill(config, formats, kernels, cuts, only_last)).lower(*args)
    if kind == "decode":
        blocks = tuple(block(batch, tokens) for tokens in shape[1])
        hidden = array(batch, 1, config.hidden_size)
        args = (weights(layers[1]), hidden, blocks, tail(batch, shape[2]), _int(), _int(batch))
        args += (_int(batch),) if shape[3] else ()
        return jax.jit(_decode(config, dtype, kernels, shape[3])).lower(*args)
    if kind == "project":
        args = (weights(layers[1]), array(batch, 1, config.hidden_size))
        return jax.jit(_project(config, dtype, kernels)).lower(*args)
    if kind in ("attend", "rank", "attend_ranked"):
        blocks = tuple(block(batch, tokens) for tokens in shape[1])
        blocks += (tail(batch, shape[2]),) if shape[2] else ()
        sides = tuple(key for key, _ in blocks)
        query = array(*kv_shape(batch, 1))
        where = (_int(len(blocks)), _int(), _int(batch))
        if kind == "attend":
            return jax.jit(kernels.attend).lower(query, blocks, *where)
        if kind == "rank":
            return jax.jit(partial(rank, most=shape[3])).lower(query, sides, *where)
        most = min(shape[3], sum(side.shape[2] for side in sides))
        heads = (batch, config.num_heads)
        ranked: Any = (_float(*heads, most), _int(*heads, most), _float(*heads, 1))
        return jax.jit(attend_ranked).lower(sides, Ranked(*ranked), _int(*heads))
    if kind == "finish":
        partial_result = (_float(*kv_shape(batch, 1)), _float(*kv_shape(batch, 1)[:3]))
        asked = (array(*kv_shape(batch, 1)), tail(batch, 1), [partial_result] * shape[1])
        args = (weights(layers[1]), array(batch, 1, config.hidden_size), *asked)
        return jax.jit(_finish(config, dtype, kernels)).lower(*args)
    if kind == "append":
        args = (tail(batch, shape[1]), tail(batch, 1), _int())
        return jax.jit(_append, donate_argnums=0).lower(*args)
    if kind == "seal":
        return jax.jit(partial(_seal, formats)).lower(tail(batch, shape[1]))
    if kind == "score":
        hidden = array(batch, shape[1], config.hidden_size)
        args = (weights(layers[-1]), hidden, _int(batch, shape[1]))
        return jax.jit(_score(config, dtype, kernels)).lower(*args)
    is_greedy, hidden = shape[1], array(batch, 1, config.hidden_size)
    sampling = (_float(batch), _int(batch), _float(batch))
    keys = jax.ShapeDtypeStruct((batch, 2), jnp.uint32)
    args = (weights(layers[-1]), hidden, *(() if is_greedy else (*sampling, keys, _int())))
    return jax.jit(_head(config, dtype, kernels, is_greedy)).lower(*args)


class Programs:
    """A model's compiled functions, by kind and shape; compiled when first asked for."""

    def __init__(self, config: ModelConfig, formats: Formats, kernels: Kernels = BY_XLA) -> None:
        self._model = (config, formats, kernels)
        self._found: dict[Any, jax.stages.Compiled] = {}
        self.compile_s = 0.0

    def _get(self, kind: str, *shape: Any) -> jax.stages.Compiled:
        program = self._found.get((kind, shape))
        if program is None:
            started = time.perf_counter()
            program = _compile(*self._model, kind, *shape)
            self.compile_s += time.perf_counter() - started
            self._found[kind, shape] = program
        return program

    def embed(self, batch: int, tokens: int) -> jax.stages.Compiled:
        """(weights, ids [batch, token], start, first_valid) -> hidden, all finite."""
        return self._get("embed", batch, tokens)

    def prefill(
        self, batch: int, cuts: tuple[int, ...], only_last: bool = False
    ) -> jax.stages.Compiled:
        """(weights, hidden, first_valid) -> hidden, of all tokens or `only_last`, blocks of `cuts`
        tokens, all finite."""
        return self._get("prefill", batch, cuts, only_last)

    def decode(
        self, batch: int, blocks: tuple[int, ...], tail: int, most: int
    ) -> jax.stages.Compiled:
        """(weights, hidden, blocks, tail, position, first_valid, and unless `most` is 0, which is
        dense attention, counts) -> hidden, new KV, all finite."""
        return self._get("decode", batch, blocks, tail, most)

    def project(self, batch: int) -> jax.stages.Compiled:
        """(weights, hidden) -> query, new KV: `decode` up to its attention."""
        return self._get("project", batch)

    def attend(self, batch: int, blocks: tuple[int, ...], tail: int) -> jax.stages.Compiled:
        """(query, blocks and, unless its length is 0, the tail, the index of each one's
        first token, position, first_valid) -> partial result."""
        return self._get("attend", batch, blocks, tail)

    def rank(
        self, batch: int, blocks: tuple[int, ...], tail: int, most: int
    ) -> jax.stages.Compiled:
        """(query, keys of blocks and tail, where they are as in `attend`) -> ranked tokens."""
        return self._get("rank", batch, blocks, tail, most)

    def attend_ranked(
        self, batch: int, blocks: tuple[int, ...], tail: int, most: int
    ) -> jax.stages.Compiled:
        """(values of blocks and tail, ranked tokens, counts) -> partial result."""
        return self._get("attend_ranked", batch, blocks, tail, most)

    def finish(self, batch: int, places: int) -> jax.stages.Compiled:
        """(weights, hidden, query, new KV, a partial result from each place) -> hidden, all
        finite: the rest of `decode`."""
        return self._get("finish", batch, places)

    def append(self, batch: int, tail: int) -> jax.stages.Compiled:
        """(tail, which is consumed, new KV, index) -> tail."""
        return self._get("append", batch, tail)

    def seal(self, batch: int, tail: int) -> jax.stages.Compiled:
        """(a full tail) -> the block as it is kept."""
        return self._get("seal", batch, tail)

    def head(self, batch: int, is_greedy: bool) -> jax.stages.Compiled:
        """(weights, hidden [batch, 1, hidden], and unless greedy the arguments of `sample`) ->
        ids, all finite."""
        return self._get("head", batch, is_greedy)

    def score(self, batch: int, tokens: int) -> jax.stages.Compiled:
        """(weights, hidden, targets [batch, token]) -> log-probabilities, all finite."""
        return self._get("score", batch, tokens)

    @property
    def workspace(self) -> int:
        """The largest temporary memory of any program compiled so far, in bytes."""
        stats = [program.memory_analysis() for program in self._found.values()]
        return max((s.temp_size_in_bytes + s.output_size_in_bytes for s in stats if s), default=0)
