"""Decode attention over keys and values where they lie.

XLA's CPU backend reads a 16-bit cache well below the memory's speed, because its loops convert
element by element. These loops read the cache at the memory's speed, in any format.

A row is one query head of one sequence; `group` consecutive rows share keys and values. Rows are
independent, so each thread takes a range of them. Up to `TOGETHER` rows of a group are computed
together, so that their keys and values are read and widened once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from flexgen_jax.cpu.jit.cache_format import CacheFormat, Side, side_of
from flexgen_jax.cpu.jit.emit import (
    F32,
    I16,
    I32,
    I64,
    Array,
    Function,
    Value,
    Variable,
)
from flexgen_jax.cpu.jit.handler import Call, compiled_handler
from flexgen_jax.cpu.jit.host_kernel import Arguments, HostKernel
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.softmax import cap, weigh
from flexgen_jax.cpu.jit.vectors import (
    exp,
    lane_sum,
    lane_sums,
    padded,
)
from flexgen_jax.layers.attention import MASKED

AHEAD = 2048
"""Distance in bytes between the token in use and the one that is prefetched."""

TOGETHER = 4
"""Rows of a group that are computed together."""

TOKENS = 4
"""Tokens whose values are added at a time."""


def emit_scores(
    side: Side,
    tokens: tuple[Value, Value],
    queries: Sequence[Array],
    scores: Sequence[Array],
) -> None:
    """Writes the products of some rows' queries and the keys of a range of tokens."""
    k, (begin, end) = queries[0].k, tokens
    many = min(LANES // len(queries), TOKENS)
    sums = [_group_sums(side.format, query) for query in queries]
    whole = begin + (end - begin) // many * many
    with k.loop(whole, begin, step=many) as token:
        of_tokens = [_products(side, token + n, queries, sums) for n in range(many)]
        totals = lane_sums([products[row] for row in range(len(queries)) for products in of_tokens])
        for row, place in enumerate(scores):
            place.store(token, totals.shuffle(range(row * many, (row + 1) * many)))
    with k.loop(end, whole) as token:
        for product, place in zip(_products(side, token, queries, sums), scores, strict=True):
            place.store(token, lane_sum(product))


def _group_sums(of: CacheFormat, query: Array) -> list[Value]:
    """Returns for each group the sums of a query's elements, lane by lane: a group's minimum is
    multiplied by them."""
    totals = [query.k.filled(F32, LANES)] * (of.num_groups if of.is_packed else 0)
    for chunk in of.chunks if of.is_packed else ():
        own = padded(query.load(chunk.start, chunk.width))
        totals[chunk.group] = totals[chunk.group] + own
    return totals


def _products(
    side: Side, token: Value, queries: Sequence[Array], sums: Sequence[Sequence[Value]]
) -> list[Value]:
    """Returns for each row the products of its query and a token's key, to be added up."""
    k, of, rows = token.k, side.format, range(len(queries))
    side.prefetch(token, AHEAD)
    by_group: dict[tuple[int, int], list[Value]] = {}
    for chunk in of.chunks:
        key = side.chunk(token, chunk)
        where = (chunk.group, chunk.width)
        before = by_group.get(where, [k.filled(F32, chunk.width)] * len(queries))
        own = [query.load(chunk.start, chunk.width) for query in queries]
        by_group[where] = [k.fma(key, own[row], before[row]) for row in rows]
    totals = [k.filled(F32, LANES)] * len(queries)
    for (group, _), products in by_group.items():
        scale = side.factors(token, group)[0] if of.is_packed else k.number(F32, 1.0)
        wide = [padded(product) for product in products]
        totals = [k.fma(wide[row], scale, totals[row]) for row in rows]
    for group in range(of.num_groups if of.is_packed else 0):
        minimum = side.factors(token, group)[1]
        totals = [k.fma(sums[row][group], minimum, totals[row]) for row in rows]
    return totals


def emit_mix(
    side: Side,
    slots: tuple[Value, Value],
    weights: Sequence[Array],
    outs: Sequence[Array],
    token_of: Array | None = None,
) -> None:
    """Adds the values of a range of slots, times each row's weights, to the rows' results, fp32.

    token_of: int32, the token of each slot; None if a slot is a token.
    """
    k, (begin, end) = outs[0].k, slots
    whole = begin + (end - begin) // TOKENS * TOKENS
    for limits, many in (((begin, whole), TOKENS), ((whole, end), 1)):
        with k.loop(limits[1], limits[0], step=many) as slot:
            _add_values(side, [slot + n for n in range(many)], end, weights, outs, token_of)


def _add_values(
    side: Side,
    slots: Sequence[Value],
    end: Value,
    weights: Sequence[Array],
    outs: Sequence[Array],
    token_of: Array | None,
) -> None:
    k, of = outs[0].k, side.format
    tokens = [slot if token_of is None else token_of.load(slot).to(slot.scalar) for slot in slots]
    for slot, token in zip(slots, tokens, strict=True):
        if token_of is None:
            side.prefetch(token, AHEAD)
        else:
            later = (slot + 2 * TOKENS).minimum(end - 1)
            side.prefetch(token_of.load(later).to(slot.scalar))
    factors: dict[int, list[tuple[Value, Value]]] = {}
    for group in range(of.num_groups if of.is_packed else 0):
        factors[group] = [side.factors(token, group) for token in tokens]
    for chunk in of.chunks:
        values = [side.chunk(token, chunk) for token in tokens]
        if of.is_packed:
            pairs = zip(values, factors[chunk.group], strict=True)
            values = [k.fma(value, scale, minimum) for value, (scale, minimum) in pairs]
        for out, weight in zip(outs, weights, strict=True):
            total = out.load(chunk.start, chunk.width)
            for slot, value in zip(slots, values, strict=True):
                total = k.fma(value, weight.load(slot), total)
            out.store(chunk.start, total)


@dataclass(frozen=True)
class Running:
    """A running softmax of rows, fp32."""

    peak: Array
    """[row], the largest score so far."""
    total: Array
    """[row], the sum of exp(score - peak)."""
    out: Array
    """[row, head_dim], the sum of exp(score - peak) * value."""


@dataclass(frozen=True)
class Rows:
    """The rows of a call."""

    query: Array
    """Scaled, fp32 [row, head_dim]."""
    limits: tuple[Value, Value]
    """Where the range of rows begins and ends."""
    group: Value
    """Rows that share keys and values."""
    softcap: Value
    """The bound of scores, 0 for none."""


@dataclass(frozen=True)
class Block:
    """A KV block."""

    keys: Side
    values: Side
    first_of: Callable[[Value], Value]
    """Emits a row's first valid token."""
    stop: Value
    """The end of the valid tokens, the same for all rows."""


def scores_room(tokens: Value) -> Value:
    """Returns the elements of `emit_fold`'s scores, for blocks of up to `tokens` tokens."""
    return (tokens + LANES).round_up(LANES) * TOGETHER


def emit_fold(block: Block, rows: Rows, running: Running, scores: Array) -> None:
    """Folds a KV block into a running result. scores: see `scores_room`."""
    k, (begin, end) = block.stop.k, rows.limits
    row = k.variable(begin)
    with k.while_(lambda: row.get() < end):
        in_group = (rows.group - row.get() % rows.group).minimum(end - row.get())
        with k.either(in_group >= TOGETHER) as branches:
            for branch, many in zip(branches, (TOGETHER, 1), strict=True):
                with branch:
                    _fold_together(block, rows, running, scores, (row.get(), many))
                    row += k.index(many)


def _fold_together(
    block: Block, rows: Rows, running: Running, scores: Array, some: tuple[Value, int]
) -> None:
    """Folds a block into the results of some rows of a group: the first one and their number."""
    k, stop, (first_row, many) = block.stop.k, block.stop, some
    size, room = block.keys.format.size, (stop + LANES).round_up(LANES)
    begin = block.first_of(first_row)
    with k.when(begin < stop):
        keys, values = (side.at(first_row // rows.group) for side in (block.keys, block.values))
        queries = [rows.query.at((first_row + n) * size) for n in range(many)]
        weights = [scores.at(room * n) for n in range(many)]
        outs = [running.out.at((first_row + n) * size) for n in range(many)]
        emit_scores(keys, (begin, stop), queries, weights)
        for n in range(many):
            row = first_row + n
            cap(k, weights[n], begin, stop, rows.softcap)
            peak = running.peak.load(row)
            highest, summed = weigh(k, weights[n], (begin, stop), stop.round_up(LANES), peak)
            fade = exp(peak - highest)
            for chunk in block.keys.format.chunks:
                out = outs[n].load(chunk.start, chunk.width)
                outs[n].store(chunk.start, out * fade)
            running.peak.store(row, highest)
            running.total.store(row, k.fma(running.total.load(row), fade, summed))
        emit_mix(values, (begin, stop), weights, outs)


@lru_cache
def attention_handler(name: str, size: int, dtype: str, bits: int) -> int:
    """Returns the handler of decode attention.

    size: elements of a head; dtype: of plain blocks; bits: the width of packed blocks, or 16.

    Its arguments: query, fp32 [row, head_dim]; first, int32 [block, batch]; stop, int32 [block];
    softcap, fp32 [1], 0 for none; and for each block the arrays of its keys and then of its values,
    which have rows for groups of query heads. Results: fp32 [row, head_dim], and the log-sum-exp of
    the scores, fp32 [row].
    """
    return compiled_handler(name, partial(_emit_attention, CacheFormat(size, dtype, bits)))


FIRST_BLOCK = 4
"""Number of the argument with which the blocks begin."""


def _emit_attention(of: CacheFormat, k: Function, call: Call) -> None:
    num_rows, (blocks, batch) = call.argument(0).size(0), (call.argument(1).size(n) for n in (0, 1))
    stops, (begin, end) = call.argument(2).array(I32), call.limits(num_rows)
    rows = Rows(
        query=call.argument(0).array(F32),
        limits=(begin, end),
        group=num_rows // (batch * call.argument(FIRST_BLOCK).size(1)),
        softcap=call.argument(3).array(F32).load(0),
    )
    most = k.variable(k.index(0))
    with k.loop(blocks) as block:
        most.set(most.get().maximum(stops.load(block).to(I64)))
    with k.workspace((F32, end - begin), (F32, scores_room(most.get()))) as (total, scores):
        out, lse = (call.result(n).array(F32) for n in range(2))
        running = Running(peak=lse, total=total.at(k.index(0) - begin), out=out)
        total.fill(end - begin)
        out.at(begin * of.size).fill((end - begin) * of.size)
        lse.at(begin).fill(end - begin, MASKED)
        argument = k.variable(k.index(FIRST_BLOCK))
        with k.loop(blocks) as block:
            firsts = call.argument(1).array(I32).at(block * batch)
            heads = num_rows // batch
            fold = partial(
                _fold_argument,
                call=call,
                first_of=lambda row: firsts.load(row // heads).to(I64),
                stop=stops.load(block).to(I64),
                work=(rows, running, scores),
            )
            _fold_block(of, call, argument, fold)
        _finish(of, running, (begin, end))


def _fold_block(
    of: CacheFormat, call: Call, argument: Variable, fold: Callable[[CacheFormat, Value], None]
) -> None:
    """Folds the block whose arrays begin at an argument, packed or plain, and advances to the next
    one."""
    k, plain = argument.k, CacheFormat(of.size, of.dtype, 16)
    if not of.is_packed:
        fold(plain, argument.get())
        argument += k.index(2)
        return
    with k.either(call.argument(argument.get()).is_packed()) as (packed, otherwise):
        with packed:
            fold(of, argument.get())
            argument += k.index(6)
        with otherwise:
            fold(plain, argument.get())
            argument += k.index(2)


def _fold_argument(
    of: CacheFormat,
    argument: Value,
    *,
    call: Call,
    first_of: Callable[[Value], Value],
    stop: Value,
    work: tuple[Rows, Running, Array],
) -> None:
    many, scalars = 3 if of.is_packed else 1, (of.scalar, I16, I16)
    tokens = call.argument(argument).size(2)

    def side(begin: Value) -> Side:
        arrays = [call.argument(begin + n).array(scalars[n]) for n in range(many)]
        return Side(of, arrays, tokens)

    emit_fold(Block(side(argument), side(argument + many), first_of, stop), *work)


def _finish(of: CacheFormat, running: Running, limits: tuple[Value, Value]) -> None:
    """Divides the results by the sums of weights, and replaces each peak by the log-sum-exp; a row
    without a valid token gets `MASKED`."""
    k, (begin, end) = limits[0].k, limits
    with k.loop(end, begin) as row:
        total = running.total.load(row)
        with k.either(total.equals(0.0)) as (is_empty, otherwise):
            with is_empty:
                running.peak.store(row, MASKED)
            with otherwise:
                log: Value = k.call("llvm.log.f32", F32, total)
                running.peak.store(row, running.peak.load(row) + log)
                for chunk in of.chunks:
                    place = row * of.size + chunk.start
                    running.out.store(place, running.out.load(place, chunk.width) / total)


@lru_cache
def fold_kernel(of: CacheFormat) -> HostKernel:
    """Returns the kernel that folds a block in host memory into a running result.

    Its arguments: query, scaled, fp32 [row, head_dim]; three arrays of keys, and three of values
    (plain ones have one, and two that are not read); first, int64 [row]; peak, total, out, see
    `Running`; the block's tokens; the end of its valid ones; rows of a group; softcap, fp32.
    """
    return HostKernel(f"flexgen_jax_fold_{of.size}_{of.dtype}_{of.bits}", partial(_emit_host, of))


def _emit_host(of: CacheFormat, k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    tokens, stop, group = (call.index(n) for n in range(11, 14))
    rows = Rows(call.array(0, F32), limits, group, call.single(14))
    running = Running(*(call.array(n, F32) for n in range(8, 11)))
    keys, values = (side_of(of, call, n, tokens) for n in (1, 4))
    block = Block(keys, values, lambda row: call.array(7, I64).load(row), stop)
    with k.workspace((F32, scores_room(stop))) as (scores,):
        emit_fold(block, rows, running, scores)
