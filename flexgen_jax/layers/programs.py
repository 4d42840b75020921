"""The compiled functions: one per layer kind and shape, with the weights as an argument.

Programs are compiled ahead of time from abstract shapes, so compilation can be timed, done
before the first weight is loaded, and asked how much temporary memory it will take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from flexgen_jax.layers.attention import Partial, first_seen, merge
from flexgen_jax.layers.decoder import DecoderLayer, KVBlock, Tail, append
from flexgen_jax.layers.embedding import Embedding, Head
from flexgen_jax.layers.experts import Router, add_expert
from flexgen_jax.layers.groups import Segment, in_groups, in_segments
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.mlp import MLP
from flexgen_jax.layers.quantization import Kept, QuantizedArray, assemble, dequantize, quantize_as
from flexgen_jax.layers.rotary import Branches, Rows
from flexgen_jax.layers.sampling import (
    Choice,
    adjust,
    greedy,
    log_probabilities,
    only_allowed,
    sample,
)
from flexgen_jax.layers.sparse_attention import Ranked, attend_ranked, rank
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.parts import AttentionSpec, ExpertsSpec
from flexgen_jax.models.spec import Formats, LayerSpec, ModelSpec, model_spec
from flexgen_jax.models.storage import Storage

Weights = Mapping[str, Kept]
"""A layer's tensors by path, e.g. "attention.q.kernel"."""

OF_ONE_TOKEN = ("decode", "project", "finish")
"""Programs of a layer for one token of each sequence; their shapes begin with the layer and the
number of sequences."""

MOST = 256
"""Programs that are kept, those used last. On a CPU each takes about a hundred mappings of memory,
at most 250, and Linux gives a process 65,530: one that has used them up crashes."""


def _apply(module: Any, weights: Weights, *args: Any, **options: Any) -> Any:
    """Calls a module with a layer's tensors as its parameters."""
    variables = {"params": unflatten_dict(dict(weights), sep=".")}
    return module.apply(variables, *args, **options)


def _embed(module: Embedding, branches: Branches | None) -> Callable[..., Any]:
    def embed(weights: Weights, ids: jax.Array, start: jax.Array, rows: Rows) -> Any:
        rows = rows.with_branches(branches, ids.shape[1])
        hidden = _apply(module, weights, ids, start, rows)
        return hidden, _checked(jnp.zeros(2, jnp.int32), jnp.isfinite(hidden).all())

    return embed


def _checked(checks: jax.Array, is_finite: jax.Array) -> jax.Array:
    """Returns the checks of a batch's layers with one more; see `Programs`."""
    count, first = checks[0] + 1, checks[1]
    first = jnp.where((first == 0) & ~is_finite, count, first)
    return jnp.stack([count, first])


def _prefill(
    layer: DecoderLayer,
    formats: Formats,
    attention: AttentionSpec,
    cuts: tuple[int, ...],
    only_last: bool,
    segments: tuple[Segment, ...],
    branches: Branches | None,
) -> Callable[..., Any]:
    sizes = layer.kernels.sizes

    def some(
        weights: Weights, before: jax.Array, skipped: int, hidden: jax.Array, *each: jax.Array
    ) -> Any:
        """Prefills some sequences, whose first `skipped` tokens are padding, with zeros for these.

        Returns their hidden states, the stored leaves of their KV blocks, and whether each
        sequence's hidden states are finite, which is checked while they are in the CPU's cache.
        """
        (first_valid, most), hidden = each, hidden[:, skipped:]
        rows = _rows(before, (first_valid - skipped, most))
        rows = rows.with_branches(branches, hidden.shape[1])
        how = {"only_last": only_last, "branches": branches}
        hidden, (key, value) = _apply(layer, weights, hidden, rows, **how, method="prefill")
        hidden = hidden if only_last else _padded(hidden, skipped, axis=1)
        key, value = (_padded(x, skipped, axis=2) for x in (key, value))
        blocks, start = [], 0
        for length in cuts:
            part = (slice(None), slice(None), slice(start, start + length))
            block = _seal(formats, (key[part], value[part]))
            blocks.append([jax.tree.leaves(side) for side in block])
            start += length
        return hidden, blocks, jnp.isfinite(hidden).all((1, 2))

    def prefill(weights: Weights, hidden: jax.Array, checks: jax.Array, rows: Rows) -> Any:
        batch, tokens, _ = hidden.shape

        def at_once(rows: int, skipped: int) -> int:
            return sizes.prefill_sequences(rows, tokens - skipped, formats.weight_bits)

        compute, each = partial(some, weights, rows.before), (rows.first_valid, rows.most)
        found = in_segments(compute, segments or [(batch, 0)], at_once, hidden, *each)
        hidden, leaves, is_finite = found
        blocks = []
        for length, sides in zip(cuts, leaves, strict=True):
            storage = formats.kv(attention.kv_shape(batch, length))
            blocks.append(tuple(assemble(storage, side) for side in sides))
        return hidden, tuple(blocks), _checked(checks, is_finite.all())

    return prefill


def _padded(x: jax.Array, tokens: int, axis: int) -> jax.Array:
    """Returns an array with zeros for so many tokens before it."""
    return jnp.pad(x, [(tokens * (n == axis), 0) for n in range(x.ndim)]) if tokens else x


def _project_chunk(
    layer: DecoderLayer, formats: Formats, attention: AttentionSpec, asked: int
) -> Callable[..., Any]:
    def project(weights: Weights, hidden: jax.Array, start: jax.Array, rows: Rows) -> Any:
        batch, tokens, _ = hidden.shape

        def some(hidden: jax.Array, *each: jax.Array) -> Any:
            args = (hidden, start, _rows(rows.before, each), asked)
            query, partial, block = _apply(layer, weights, *args, method="project_chunk")
            return query, partial, [jax.tree.leaves(side) for side in _seal(formats, block)]

        size = layer.kernels.sizes.prefill_sequences(batch, tokens, formats.weight_bits)
        each = (rows.first_valid, rows.most)
        query, partial, sides = in_groups(some, size, hidden, *each)
        storage = formats.kv(attention.kv_shape(batch, tokens))
        return query, partial, tuple(assemble(storage, side) for side in sides)

    return project


def _rows(before: jax.Array, each: Sequence[jax.Array]) -> Rows:
    """Returns the rows of some of a batch's sequences."""
    first_valid, most = each
    return Rows(first_valid, before, most)


def _attend_chunk(kernels: Kernels, attention: AttentionSpec) -> Callable[..., Any]:
    def attend_chunk(
        partial: Partial,
        query: jax.Array,
        block: KVBlock,
        start: jax.Array,
        at: jax.Array,
        rows: Rows,
    ) -> Partial:
        first = jnp.maximum(rows.first_valid - start, 0)
        args = (query, *block, first, at - start, attention)
        return merge([partial, kernels.chunk_attention(*args)])

    return attend_chunk


def _attend_prefix(
    kernels: Kernels, formats: Formats, attention: AttentionSpec
) -> Callable[..., Any]:
    def attend_prefix(query: jax.Array, blocks: tuple[KVBlock, ...]) -> Partial:
        batch, heads, tokens, size = query.shape
        none = jnp.zeros(1, jnp.int32)

        def some(query: jax.Array) -> Partial:
            """Attends with the tokens of some sequences, which are to the prefix as those of
            one."""
            rows = query.shape[0]
            asked = query.swapaxes(0, 1).reshape(1, heads, rows * tokens, size)
            found = [
                kernels.chunk_attention(
                    asked, *block, none, jnp.int32(block[0].shape[2]), attention
                )
                for block in blocks
            ]
            out, lse = merge(found)
            out = out.reshape(heads, rows, tokens, size).swapaxes(0, 1)
            return out, lse.reshape(heads, rows, tokens).swapaxes(0, 1)

        together = kernels.sizes.prefill_sequences(batch, tokens, formats.weight_bits)
        found: Partial = in_groups(some, together, query)
        return found

    return attend_prefix


def _finish_chunk(layer: DecoderLayer, formats: Formats) -> Callable[..., Any]:
    def finish(
        weights: Weights, hidden: jax.Array, checks: jax.Array, partials: list[Partial]
    ) -> Any:
        def some(hidden: jax.Array, *parts: jax.Array) -> Any:
            attended, _ = merge(list(zip(parts[::2], parts[1::2], strict=True)))
            hidden = _apply(layer, weights, hidden, attended, method="finish_chunk")
            return hidden, jnp.isfinite(hidden).all((1, 2))

        batch, tokens, _ = hidden.shape
        size = layer.kernels.sizes.prefill_sequences(batch, tokens, formats.weight_bits)
        hidden, is_finite = in_groups(some, size, hidden, *jax.tree.leaves(partials))
        return hidden, _checked(checks, is_finite.all())

    return finish


def _seal(formats: Formats, block: KVBlock) -> KVBlock:
    """Returns a full block as the cache keeps it, quantized or not."""
    if formats.cache_bits == 16:
        return block
    key, value = (quantize_as(x, formats.kv(x.shape)) for x in block)
    return key, value


def _decode(layer: DecoderLayer, most: int, appends: bool) -> Callable[..., Any]:
    def decode(
        weights: Weights,
        hidden: jax.Array,
        blocks: tuple[KVBlock, ...],
        tail: Tail,
        checks: jax.Array,
        position: jax.Array,
        *where: jax.Array,
    ) -> Any:
        args = (hidden, blocks, tail, position, *where)
        how = {"most": most, "appends": appends, "method": "decode"}
        hidden, new = _apply(layer, weights, *args, **how)
        return hidden, new, _checked(checks, jnp.isfinite(hidden).all())

    return decode


def _unpack(weights: Weights) -> Weights:
    return {
        path: dequantize(kept) if isinstance(kept, QuantizedArray) else kept
        for path, kept in weights.items()
    }


def _route(router: Router) -> Callable[..., Any]:
    def route(weights: Weights, hidden: jax.Array) -> Any:
        return _apply(router, weights, hidden.reshape(-1, hidden.shape[-1]))

    return route


def _guess(router: Router) -> Callable[..., Any]:
    def guess(weights: Weights, hidden: jax.Array) -> Any:
        rows = hidden.reshape(-1, hidden.shape[-1])
        return _apply(router, weights, rows, method="guess")

    return guess


def _expert(block: MLP, size: int) -> Callable[..., Any]:
    def expert(weights: Weights, *args: jax.Array) -> jax.Array:
        return add_expert(partial(_apply, block, weights), size, *args)

    return expert


def _combine(hidden: jax.Array, checks: jax.Array, out: jax.Array) -> Any:
    hidden = hidden + out.reshape(hidden.shape).astype(hidden.dtype)
    is_finite = jnp.isfinite(hidden).all()
    first = jnp.where((checks[1] == 0) & ~is_finite, checks[0], checks[1])
    return hidden, checks.at[1].set(first)


def _project(layer: DecoderLayer) -> Callable[..., Any]:
    def project(weights: Weights, hidden: jax.Array, position: jax.Array, rows: Rows) -> Any:
        return _apply(layer, weights, hidden, position, rows, method="project")

    return project


def _attend(kernels: Kernels, attention: AttentionSpec) -> Callable[..., Any]:
    def attend(
        query: jax.Array,
        blocks: tuple[KVBlock, ...],
        starts: jax.Array,
        position: jax.Array,
        rows: Rows,
    ) -> Partial:
        first = first_seen(position, rows.first_valid, attention.window)
        return kernels.decode_attention(query, blocks, starts, position, first, attention)

    return attend


def _rank(kernels: Kernels, attention: AttentionSpec, most: int) -> Callable[..., Any]:
    def rank_tokens(
        query: jax.Array,
        keys: tuple[Kept, ...],
        starts: jax.Array,
        position: jax.Array,
        rows: Rows,
    ) -> Ranked:
        first = first_seen(position, rows.first_valid, attention.window)
        args = (query, keys, starts, position, first, most, kernels.tuning, attention.softcap)
        return rank(*args)

    return rank_tokens


def _finish(layer: DecoderLayer) -> Callable[..., Any]:
    def finish(weights: Weights, hidden: jax.Array, checks: jax.Array, *args: Any) -> Any:
        hidden = _apply(layer, weights, hidden, *args, method="finish")
        return hidden, _checked(checks, jnp.isfinite(hidden).all())

    return finish


def _head(module: Head, choice: Choice) -> Callable[..., Any]:
    def head(weights: Weights, hidden: jax.Array, checks: jax.Array, *args: jax.Array) -> Any:
        logits = _apply(module, weights, hidden[:, -1])
        changed = logits
        if choice.is_masked:
            *args, allowed = args  # type: ignore[assignment]
            changed = only_allowed(changed, allowed)
        if choice.adjusted:
            changed = adjust(changed, *args[-3:])
        sampling = args[:-3] if choice.adjusted else args
        ids = greedy(changed) if choice.is_greedy else sample(changed, *sampling)
        checks = _checked(checks, jnp.isfinite(logits).all())
        if choice.logprobs is None:
            return ids[:, None], checks
        return (ids[:, None], *log_probabilities(logits, ids, choice.logprobs)), checks

    return head


def _score(module: Head) -> Callable[..., Any]:
    def score(weights: Weights, hidden: jax.Array, checks: jax.Array, targets: jax.Array) -> Any:
        """Returns the log-probability of each target, fp32 [batch, token], whether it is the greedy
        choice, and the checks. Targets are those of the last tokens."""
        hidden = hidden[:, -targets.shape[1] :]

        def some(rows: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = _apply(module, weights, rows)
            found = jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[:, None], axis=1)
            return found[:, 0], greedy(logits) == wanted

        rows = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
        found = in_groups(some, min(module.kernels.sizes.scored_rows, targets.size), *rows)
        is_finite = jnp.isfinite(found[0]).all()
        return tuple(x.reshape(targets.shape) for x in found), _checked(checks, is_finite)

    return score


def _int(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _batch(rows: int) -> Rows:
    """Returns the abstract arguments that say where a batch's sequences are."""
    return Rows(_int(rows), _int(), _int(rows))


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@lru_cache(maxsize=MOST)
def _compile(model: _Lowering, kind: str, *shape: Any) -> jax.stages.Compiled:
    lowered: jax.stages.Lowered = getattr(model, kind)(*shape)
    is_lone = kind in OF_ONE_TOKEN and shape[1] == 1
    return lowered.compile(compiler_options=model.kernels.compiler_options(model.formats, is_lone))


@dataclass(frozen=True, eq=False)  # compared in every step: `_lowering` makes one of a kind
class _Lowering:
    """Traces each kind of program for its abstract arguments.

    The methods are those of `Programs`, but take a layer's index in place of the layer.
    """

    config: ModelConfig
    formats: Formats
    kernels: Kernels

    @property
    def _spec(self) -> ModelSpec:
        return model_spec(self.config)

    @property
    def _dtype(self) -> jnp.dtype:
        return jnp.dtype(self.formats.dtype)

    def _decoder(self, layer: int) -> DecoderLayer:
        how = (self.kernels, self._dtype, self.formats.matmul_bits)
        return DecoderLayer(self.config, self._spec.layers[layer].decoder, *how)

    @property
    def _head(self) -> Head:
        return Head(self.config, self.kernels, self._dtype)

    def _array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self._dtype)

    def _hidden(self, batch: int, tokens: int) -> jax.ShapeDtypeStruct:
        return self._array(*self._spec.hidden_shape(batch, tokens))

    def _weights(self, layer: LayerSpec, expert: int | None = None) -> dict[str, Any]:
        """The tensors of a layer, or of one of its experts, which are no part of the layer's."""
        tensors = [t for t in layer.tensors if t.expert == expert]
        return {t.own_path: _abstract(self.formats.weight(t)) for t in tensors}

    def _attention(self, layer: int) -> AttentionSpec:
        return self._spec.layers[layer].attention

    def _tail(self, layer: int, batch: int, tokens: int) -> tuple[Any, Any]:
        return (self._array(*self._attention(layer).kv_shape(batch, tokens)),) * 2

    def _blocks(self, layer: int, batch: int, lengths: tuple[int, ...]) -> tuple[Any, ...]:
        shapes = (self._attention(layer).kv_shape(batch, tokens) for tokens in lengths)
        return tuple((_abstract(self.formats.kv(shape)),) * 2 for shape in shapes)

    def _query(self, layer: int, batch: int) -> jax.ShapeDtypeStruct:
        return self._array(*self._attention(layer).query_shape(batch))

    def embed(self, batch: int, tokens: int, branches: Branches | None) -> jax.stages.Lowered:
        module = Embedding(self.config, self.kernels, self._dtype)
        args = (self._weights(self._spec.embedding), _int(batch, tokens), _int(), _batch(batch))
        return jax.jit(_embed(module, branches)).lower(*args)

    def prefill(
        self,
        layer: int,
        batch: int,
        cuts: tuple[int, ...],
        only_last: bool,
        segments: tuple[Segment, ...],
        branches: Branches | None,
    ) -> jax.stages.Lowered:
        attention, weights = self._attention(layer), self._weights(self._spec.layers[layer])
        how = (cuts, only_last, segments, branches)
        program = _prefill(self._decoder(layer), self.formats, attention, *how)
        hidden = self._hidden(batch, sum(cuts))
        return jax.jit(program).lower(weights, hidden, _int(2), _batch(batch))

    def project_chunk(self, layer: int, batch: int, tokens: int, asked: int) -> jax.stages.Lowered:
        attention, weights = self._attention(layer), self._weights(self._spec.layers[layer])
        program = _project_chunk(self._decoder(layer), self.formats, attention, asked)
        args = (self._hidden(batch, tokens), _int(), _batch(batch))
        return jax.jit(program).lower(weights, *args)

    def attend_chunk(self, layer: int, batch: int, asked: int, tokens: int) -> jax.stages.Lowered:
        shape = self._attention(layer).query_shape(batch, asked)
        partial = (_float(*shape), _float(*shape[:3]))
        (block,) = self._blocks(layer, batch, (tokens,))
        args = (partial, self._array(*shape), block, _int(), _int(), _batch(batch))
        program = _attend_chunk(self.kernels, self._attention(layer))
        return jax.jit(program, donate_argnums=0).lower(*args)

    def attend_prefix(
        self, layer: int, batch: int, asked: int, blocks: tuple[int, ...]
    ) -> jax.stages.Lowered:
        query = self._array(*self._attention(layer).query_shape(batch, asked))
        program = jax.jit(_attend_prefix(self.kernels, self.formats, self._attention(layer)))
        return program.lower(query, self._blocks(layer, 1, blocks))

    def finish_chunk(
        self, layer: int, batch: int, tokens: int, asked: int, places: int
    ) -> jax.stages.Lowered:
        shape = self._attention(layer).query_shape(batch, asked)
        partials = [(_float(*shape), _float(*shape[:3]))] * places
        weights = self._weights(self._spec.layers[layer])
        program = _finish_chunk(self._decoder(layer), self.formats)
        return jax.jit(program).lower(weights, self._hidden(batch, tokens), _int(2), partials)

    def decode(
        self,
        layer: int,
        batch: int,
        blocks: tuple[int, ...],
        tail: int,
        most: int,
        appends: bool,
    ) -> jax.stages.Lowered:
        cache = (self._blocks(layer, batch, blocks), self._tail(layer, batch, tail))
        counts = (_int(batch),) if most else ()
        args = (self._hidden(batch, 1), *cache, _int(2), _int(), _batch(batch), *counts)
        weights = self._weights(self._spec.layers[layer])
        program = _decode(self._decoder(layer), most, appends)
        return jax.jit(program, donate_argnums=3 if appends else ()).lower(weights, *args)

    def unpack(self, layer: int) -> jax.stages.Lowered:
        return jax.jit(_unpack).lower(self._weights(self._spec.layers[layer]))

    def route(self, layer: int, batch: int, tokens: int) -> jax.stages.Lowered:
        spec = self._spec.layers[layer]
        how = (self.kernels, self._dtype, self.formats.matmul_bits)
        router = Router(self.config, _experts(spec), *how)
        args = (self._weights(spec), self._hidden(batch, tokens))
        return jax.jit(_route(router)).lower(*args)

    def guess(self, layer: int, batch: int) -> jax.stages.Lowered:
        spec = self._spec.layers[layer]
        router = Router(self.config, _experts(spec), self.kernels, self._dtype)
        weights = {t.path: _abstract(self.formats.weight(t)) for t in spec.routing}
        return jax.jit(_guess(router)).lower(weights, self._hidden(batch, 1))

    def expert(self, layer: int, tokens: int) -> jax.stages.Lowered:
        spec = self._spec.layers[layer]
        experts, hidden = _experts(spec), self._spec.hidden_size
        block = MLP(experts.expert, self.kernels, self._dtype, self.formats.matmul_bits)
        routed = (
            self._array(tokens, hidden),
            _int(tokens, experts.top),
            _float(tokens, experts.top),
        )
        program = _expert(block, experts.rows_at_once(tokens))
        args = (self._weights(spec, 0), *routed, _int(), _float(tokens, hidden))
        return jax.jit(program, donate_argnums=5).lower(*args)

    def combine(self, batch: int, tokens: int) -> jax.stages.Lowered:
        out = _float(batch * tokens, self._spec.hidden_size)
        return jax.jit(_combine).lower(self._hidden(batch, tokens), _int(2), out)

    def project(self, layer: int, batch: int) -> jax.stages.Lowered:
        weights = self._weights(self._spec.layers[layer])
        args = (self._hidden(batch, 1), _int(), _batch(batch))
        return jax.jit(_project(self._decoder(layer))).lower(weights, *args)

    def finish(self, layer: int, batch: int, places: int) -> jax.stages.Lowered:
        shape = self._attention(layer).query_shape(batch)
        partials = [(_float(*shape), _float(*shape[:3]))] * places
        asked = (self._query(layer, batch), self._tail(layer, batch, 1), partials)
        weights = self._weights(self._spec.layers[layer])
        hidden = self._hidden(batch, 1)
        return jax.jit(_finish(self._decoder(layer))).lower(weights, hidden, _int(2), *asked)

    def attend(
        self, layer: int, batch: int, blocks: tuple[int, ...], tail: int
    ) -> jax.stages.Lowered:
        cache = self._with_tail(layer, batch, blocks, tail)
        where = (_int(len(cache)), _int(), _batch(batch))
        program = jax.jit(_attend(self.kernels, self._attention(layer)))
        return program.lower(self._query(layer, batch), cache, *where)

    def rank(
        self, layer: int, batch: int, blocks: tuple[int, ...], tail: int, most: int
    ) -> jax.stages.Lowered:
        keys = tuple(key for key, _ in self._with_tail(layer, batch, blocks, tail))
        where = (_int(len(keys)), _int(), _batch(batch))
        program = jax.jit(_rank(self.kernels, self._attention(layer), most))
        return program.lower(self._query(layer, batch), keys, *where)

    def attend_ranked(
        self, layer: int, batch: int, blocks: tuple[int, ...], tail: int, most: int
    ) -> jax.stages.Lowered:
        values = tuple(value for _, value in self._with_tail(layer, batch, blocks, tail))
        most = min(most, sum(value.shape[2] for value in values))
        heads = self._attention(layer).query_shape(batch)[:2]
        ranked: Any = (_float(*heads, most), _int(*heads, most), _float(*heads, 1))
        program = jax.jit(partial(attend_ranked, tuning=self.kernels.tuning))
        return program.lower(values, Ranked(*ranked), _int(*heads))

    def _with_tail(
        self, layer: int, batch: int, blocks: tuple[int, ...], tail: int
    ) -> tuple[Any, ...]:
        cache = self._blocks(layer, batch, blocks)
        return (*cache, self._tail(layer, batch, tail)) if tail else cache

    def append(self, layer: int, batch: int, tail: int) -> jax.stages.Lowered:
        args = (self._tail(layer, batch, tail), self._tail(layer, batch, 1), _int())
        return jax.jit(append, donate_argnums=0).lower(*args)

    def seal(self, layer: int, batch: int, tail: int) -> jax.stages.Lowered:
        return jax.jit(partial(_seal, self.formats)).lower(self._tail(layer, batch, tail))

    def score(self, batch: int, tokens: int, scored: int) -> jax.stages.Lowered:
        args = (self._hidden(batch, tokens), _int(2), _int(batch, scored))
        return jax.jit(_score(self._head)).lower(self._weights(self._spec.head), *args)

    def head(self, batch: int, choice: Choice) -> jax.stages.Lowered:
        args: tuple[Any, ...] = (self._weights(self._spec.head), self._hidden(batch, 1), _int(2))
        if not choice.is_greedy:
            keys, row, number = jax.ShapeDtypeStruct((batch, 2), jnp.uint32), _float(batch), _int()
            args = (*args, row, _int(batch), row, row, keys, _int(batch), number)
        if choice.adjusted:
            some = (batch, choice.adjusted)
            args = (*args, _int(*some), _float(*some), _float(*some))
        if choice.is_masked:
            words = -(-self.config.vocab_size // 32)
            args = (*args, jax.ShapeDtypeStruct((batch, words), jnp.uint32))
        return jax.jit(_head(self._head, choice)).lower(*args)


_lowering = lru_cache(maxsize=64)(_Lowering)


def _experts(layer: LayerSpec) -> ExpertsSpec:
    assert layer.experts is not None, "the layer has experts"
    return layer.experts


def _abstract(storage: Storage) -> Any:
    """Returns an abstract array: the shapes and dtypes of what is stored, without the numbers."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in storage.leaves]
    return assemble(storage, leaves)


class Programs:
    """A model's programs by kind and shape, each compiled when it is first asked for.

    Decoder layers of equal shapes share their programs. A method's docstring says what its program
    does, takes and returns. `checks` is int32 [2]: how many layers a batch's tokens have gone
    through, and the number of the first of these, counted from 1, whose results were not all
    finite, 0 if all were. `rows` is a `Rows`: where the batch's sequences are.
    """

    def __init__(self, config: ModelConfig, formats: Formats, kernels: Kernels) -> None:
        self.kernels = kernels
        self._model = _lowering(config, formats, kernels)
        self._alike = model_spec(config).alike
        self._needed: dict[tuple[str, tuple[Any, ...]], int] = {}
        self._compile_s = 0.0

    @cached_property
    def plain(self) -> Programs:
        """The programs for decoder layers whose weights `unpack` has unpacked; these, if none are
        packed."""
        model = self._model
        if model.formats.weight_bits == 16:
            return self
        return Programs(model.config, replace(model.formats, weight_bits=16), model.kernels)

    @property
    def compile_s(self) -> float:
        """Seconds of compiling so far, with `plain`."""
        return sum(programs._compile_s for programs in {self, self.plain})

    def _get(self, kind: str, *shape: Any) -> jax.stages.Compiled:
        before, started = _compile.cache_info().misses, time.perf_counter()
        program = _compile(self._model, kind, *shape)
        if _compile.cache_info().misses != before:
            self._compile_s += time.perf_counter() - started
        if (kind, shape) not in self._needed:
            self._needed[kind, shape] = _workspace_of(program)
        return program

    def _of(self, kind: str, layer: LayerSpec, *shape: Any) -> jax.stages.Compiled:
        return self._get(kind, self._alike[layer.index], *shape)

    def embed(
        self, batch: int, tokens: int, branches: Branches | None = None
    ) -> jax.stages.Compiled:
        """Embeds tokens: (weights, ids [batch, token], start, rows) -> hidden, checks. branches:
        what the rows end with."""
        return self._get("embed", batch, tokens, branches)

    def prefill(
        self,
        layer: LayerSpec,
        batch: int,
        cuts: tuple[int, ...],
        only_last: bool = False,
        segments: tuple[Segment, ...] = (),
        branches: Branches | None = None,
    ) -> jax.stages.Compiled:
        """Prefills a decoder layer: (weights, hidden, checks, rows) -> hidden, blocks,
        checks.

        Hidden states are those of all tokens, or with `only_last` of the last one. The KV blocks
        have `cuts` tokens. segments: padding to leave out; by default none; branches: what the rows
        end with.
        """
        return self._of("prefill", layer, batch, cuts, only_last, segments, branches)

    def project_chunk(
        self, layer: LayerSpec, batch: int, tokens: int, asked: int
    ) -> jax.stages.Compiled:
        """Computes the prefill of a prompt's chunk up to attention to earlier tokens: (weights,
        hidden, start, rows) -> query, partial result, KV block.

        Query and result are those of the last `asked` tokens.
        """
        return self._of("project_chunk", layer, batch, tokens, asked)

    def attend_chunk(
        self, layer: LayerSpec, batch: int, asked: int, tokens: int
    ) -> jax.stages.Compiled:
        """Attends with a chunk's tokens to an earlier KV block of so many tokens: (partial result,
        which is donated, query, block, start of the block, index of the first of the tokens, rows)
        -> partial result of both.
        """
        return self._of("attend_chunk", layer, batch, asked, tokens)

    def attend_prefix(
        self, layer: LayerSpec, batch: int, asked: int, blocks: tuple[int, ...]
    ) -> jax.stages.Compiled:
        """Attends with `asked` tokens of each sequence to KV blocks of one row, which all sequences
        share: (query, blocks) -> partial result."""
        return self._of("attend_prefix", layer, batch, asked, blocks)

    def finish_chunk(
        self, layer: LayerSpec, batch: int, tokens: int, asked: int, places: int
    ) -> jax.stages.Compiled:
        """Computes the prefill of a chunk after attention: (weights, hidden, checks, a list of
        partial results, one for each place) -> hidden states of the last `asked` tokens, checks."""
        return self._of("finish_chunk", layer, batch, tokens, asked, places)

    def decode(
        self,
        layer: LayerSpec,
        batch: int,
        blocks: tuple[int, ...],
        tail: int,
        most: int,
        appends: bool = False,
    ) -> jax.stages.Compiled:
        """Decodes one token in a decoder layer: (weights, hidden, blocks, tail, checks, position,
        rows, counts) -> hidden, new key and value, checks.

        If `most` is 0, attention is dense and there is no argument `counts`. With `appends`, the
        tail is donated, and comes back with the new key and value in place of these.
        """
        return self._of("decode", layer, batch, blocks, tail, most, appends)

    def route(self, layer: LayerSpec, batch: int, tokens: int) -> jax.stages.Compiled:
        """Chooses experts: (weights without theirs, hidden states after attention) -> the results
        of `layers.experts.Router`, for batch times `tokens` tokens."""
        return self._of("route", layer, batch, tokens)

    def guess(self, layer: LayerSpec, batch: int) -> jax.stages.Compiled:
        """Guesses a layer's experts: (its tensors for routing, hidden states of one token of the
        layer before) -> numbers of experts, int32 [batch, top]."""
        return self._of("guess", layer, batch)

    def expert(self, layer: LayerSpec, tokens: int) -> jax.stages.Compiled:
        """Adds an expert's result: (its weights, the results of `route` but for the last, number of
        the expert, result so far, which is donated) -> result."""
        return self._of("expert", layer, tokens)

    def combine(self, batch: int, tokens: int) -> jax.stages.Compiled:
        """Ends a layer with experts: (hidden states after attention, checks, result of all experts)
        -> hidden, checks, in which the layer counts already."""
        return self._get("combine", batch, tokens)

    def unpack(self, layer: LayerSpec) -> jax.stages.Compiled:
        """Unpacks a decoder layer's weights: (weights) -> weights in the dtype."""
        return self._of("unpack", layer)

    def project(self, layer: LayerSpec, batch: int) -> jax.stages.Compiled:
        """Computes `decode` up to attention: (weights, hidden, position, rows) -> query, new key
        and value."""
        return self._of("project", layer, batch)

    def attend(
        self, layer: LayerSpec, batch: int, blocks: tuple[int, ...], tail: int
    ) -> jax.stages.Compiled:
        """Attends to KV blocks: (query, blocks, starts, position, rows) -> partial result.

        The tail is the last of the blocks, unless its length is 0; starts: int32 [block], the
        index of each block's first token.
        """
        return self._of("attend", layer, batch, blocks, tail)

    def rank(
        self, layer: LayerSpec, batch: int, blocks: tuple[int, ...], tail: int, most: int
    ) -> jax.stages.Compiled:
        """Ranks tokens for sparse attention: (query, keys of blocks and tail, starts, position,
        rows) -> `Ranked` with at most `most` candidates."""
        return self._of("rank", layer, batch, blocks, tail, most)

    def attend_ranked(
        self, layer: LayerSpec, batch: int, blocks: tuple[int, ...], tail: int, most: int
    ) -> jax.stages.Compiled:
        """Attends to ranked tokens: (values of blocks and tail, `Ranked`, counts) -> partial
        result."""
        return self._of("attend_ranked", layer, batch, blocks, tail, most)

    def finish(self, layer: LayerSpec, batch: int, places: int) -> jax.stages.Compiled:
        """Computes `decode` after attention: (weights, hidden, checks, query, new key and value, a
        list of partial results, one for each place) -> hidden, checks."""
        return self._of("finish", layer, batch, places)

    def append(self, layer: LayerSpec, batch: int, tail: int) -> jax.stages.Compiled:
        """Appends a token to a tail: (tail, which is donated, new key and value, index) -> tail."""
        return self._of("append", layer, batch, tail)

    def seal(self, layer: LayerSpec, batch: int, tail: int) -> jax.stages.Compiled:
        """Seals a full tail: (tail) -> the block as the cache keeps it."""
        return self._of("seal", layer, batch, tail)

    def head(self, batch: int, choice: Choice) -> jax.stages.Compiled:
        """Chooses tokens: (weights, hidden [batch, 1, hidden], checks, unless the choice is greedy
        the further arguments of `sample`, if some logits are adjusted those of `adjust`, if only
        some tokens are allowed that of `only_allowed`) -> ids [batch, 1], checks; with
        log-probabilities, the ids come with `log_probabilities`."""
        return self._get("head", batch, choice)

    def score(self, batch: int, tokens: int, scored: int) -> jax.stages.Compiled:
        """Scores the last `scored` of a batch's tokens: (weights, hidden, checks, targets [batch,
        scored]) -> (log-probabilities, whether they are the greedy choices, each [batch, scored]),
        checks."""
        return self._get("score", batch, tokens, scored)

    @property
    def workspace(self) -> int:
        """Bytes of temporaries and results of the program that needs most, of those compiled, with
        `plain`."""
        known = [x for programs in {self, self.plain} for x in programs._needed.values()]
        return max(known, default=0)


def _workspace_of(program: jax.stages.Compiled) -> int:
    """Returns the bytes of a program's temporaries and results."""
    said = program.memory_analysis()
    if said is None:
        return 0
    return int(said.temp_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes)
