"""The tokens with the highest scores, for sparse attention on the host."""

from __future__ import annotations

from functools import lru_cache, partial

from flexgen_jax.cpu.jit.cache_format import CacheFormat, side_of
from flexgen_jax.cpu.jit.decode_attention import emit_mix, emit_scores
from flexgen_jax.cpu.jit.emit import F32, I32, I64, Array, Function, Value, Variable
from flexgen_jax.cpu.jit.host_kernel import Arguments, HostKernel
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.softmax import cap, weigh
from flexgen_jax.cpu.jit.vectors import exp
from flexgen_jax.layers.attention import MASKED

LEAST = MASKED / 2
"""Tokens that are not valid have scores below this."""

NEGATIVE_INFINITY = float("-inf")


@lru_cache
def score_kernel(of: CacheFormat) -> HostKernel:
    """Returns the kernel that writes the scores of a block's valid tokens.

    Its arguments: query, scaled, fp32 [row, head_dim]; three arrays of keys; first, int64 [row],
    each row's first valid token; peak, total, fp32 [row], updated as in `decode_attention.Running`;
    scores, fp32 [row, token of the sequence]; their width; the block's tokens; the end of its valid
    ones; rows of a group; softcap, fp32, 0 for none; the index of the block's first token.
    """
    return HostKernel(f"flexgen_jax_score_{of.size}_{of.dtype}_{of.bits}", partial(_score, of))


def _score(of: CacheFormat, k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    width, tokens, stop, group = (call.index(n) for n in range(8, 12))
    keys, firsts = side_of(of, call, 1, tokens), call.array(4, I64)
    peaks, totals = (call.array(n, F32) for n in (5, 6))
    room = (stop + LANES).round_up(LANES)
    with (
        k.workspace((F32, room), (F32, room)) as (scores, weights),
        k.loop(limits[1], limits[0]) as row,
    ):
        begin = firsts.load(row)
        with k.when(begin < stop):
            query = call.array(0, F32).at(row * of.size)
            emit_scores(keys.at(row // group), (begin, stop), [query], [scores])
            cap(k, scores, begin, stop, call.single(12))
            written = call.array(7, F32).at(row * width + call.index(13))
            with k.loop(stop, begin) as token:
                written.store(token, scores.load(token))
                weights.store(token, scores.load(token))
            peak = peaks.load(row)
            highest, total = weigh(k, weights, (begin, stop), stop.round_up(LANES), peak)
            totals.store(row, k.fma(totals.load(row), exp(peak - highest), total))
            peaks.store(row, highest)


@lru_cache
def mix_kernel(of: CacheFormat) -> HostKernel:
    """Returns the kernel that adds the values of a block's chosen tokens, times exp(score - lse).

    Its arguments: scores, fp32 [row, token of the sequence]; their width; lse, fp32 [row]; chosen,
    int32 [row, slot], rising indices of tokens in the sequence; the slots of a row; counts, int32
    [row], how many slots are used; remaining, int32 [row], reduced by the number of chosen tokens
    in this block; three arrays of values; out, fp32 [row, head_dim]; the block's tokens; the end of
    its valid ones; the index of its first token; rows of a group.
    """
    return HostKernel(f"flexgen_jax_mix_{of.size}_{of.dtype}_{of.bits}", partial(_mix, of))


def _mix(of: CacheFormat, k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    width, slots = call.index(1), call.index(4)
    tokens, stop, offset, group = (call.index(n) for n in range(11, 15))
    values, out = side_of(of, call, 7, tokens), call.array(10, F32)
    with (
        k.workspace((F32, slots), (I32, slots)) as (weights, places),
        k.loop(limits[1], limits[0]) as row,
    ):
        chosen = call.array(3, I32).at(row * slots)
        count = call.array(5, I32).load(row).to(I64)
        begin, end = (_num_below(k, chosen, count, limit) for limit in (offset, offset + stop))
        scores, lse = call.array(0, F32).at(row * width), call.array(2, F32).load(row)
        with k.loop(end, begin) as slot:
            token = chosen.load(slot).to(I64)
            weights.store(slot, exp(scores.load(token) - lse))
            places.store(slot, (token - offset).to(I32))
        own = out.at(row * of.size)
        emit_mix(values.at(row // group), (begin, end), [weights], [own], places)
        remaining = call.array(6, I32)
        remaining.store(row, remaining.load(row) - (end - begin).to(I32))


def _num_below(k: Function, rising: Array, count: Value, limit: Value) -> Value:
    """Returns how many of `count` rising numbers are below a limit."""
    low, high = k.variable(k.index(0)), k.variable(count)
    with k.while_(lambda: low.get() < high.get()):
        middle = (low.get() + high.get()) // 2
        is_below = rising.load(middle).to(I64) < limit
        low.set(is_below.select(middle + 1, low.get()))
        high.set(is_below.select(high.get(), middle))
    return low.get()


@lru_cache
def choose_kernel() -> HostKernel:
    """Returns the kernel that finds each row's highest scores.

    Its arguments: scores, fp32 [row, width]; their width; counts, int32 [row]; chosen, int32 [row,
    slot]; the slots of a row, one more than tokens. It writes the counts[row] tokens with the
    highest scores to chosen, in rising order; of equal scores it takes the first. At least
    counts[row] scores are above `LEAST`. Where scores are NaN, counts[row] may become smaller.
    """
    return HostKernel("flexgen_jax_choose", _choose)


def _choose(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    width, counts, slots = call.index(1), call.array(2, I32), call.index(4)
    with k.loop(limits[1], limits[0]) as row:
        scores = call.array(0, F32).at(row * width)
        chosen, count = call.array(3, I32).at(row * slots), counts.load(row)
        highest = _largest(k, scores, width)
        bound = k.variable(highest)
        is_enough = _num_reaching(k, scores, width, highest) >= count
        with k.when((is_enough | count.equals(0)).equals(0)):
            _search_bound(k, (scores, width), count, bound)
        counts.store(row, _write_chosen(k, (scores, width), bound.get(), count, chosen))


def _search_bound(k: Function, scores: tuple[Array, Value], count: Value, low: Variable) -> None:
    """Finds a bound that enough scores reach, then the largest such bound: counting is fast."""
    high, step = k.variable(low.get()), k.variable(k.number(F32, 1.0))
    reached = k.variable(k.number(I32, 0))
    with k.while_(lambda: (reached.get() < count) & (low.get() > LEAST)):
        high.set(low.get())
        low.set(low.get() - step.get())
        step += step.get()
        reached.set(_num_reaching(k, *scores, low.get()))
    middle = k.variable(low.get() * 0.5 + high.get() * 0.5)

    def is_open() -> Value:
        is_between = (low.get() < middle.get()) & (middle.get() < high.get())
        return reached.get().differs(count) & is_between

    with k.while_(is_open):
        reached.set(_num_reaching(k, *scores, middle.get()))
        is_enough = reached.get() >= count
        low.set(is_enough.select(middle.get(), low.get()))
        high.set(is_enough.select(high.get(), middle.get()))
        middle.set(low.get() * 0.5 + high.get() * 0.5)


def _largest(k: Function, scores: Array, size: Value) -> Value:
    """Returns the largest score. NaN is ignored, and shows in the sum of the weights."""
    whole = size // LANES * LANES
    lanes = k.variable(k.filled(F32, LANES, NEGATIVE_INFINITY))
    with k.loop(whole, step=LANES) as at:
        lanes.set(scores.load(at, LANES).maximum(lanes.get()))
    most = k.variable(lanes.get().reduce("fmax", ("nnan",)))
    with k.loop(size, whole) as at:
        most.set(scores.load(at).maximum(most.get()))
    return most.get()


def _num_reaching(k: Function, scores: Array, size: Value, bound: Value) -> Value:
    """Counts the scores that are at least the bound, as int32."""
    whole = size // LANES * LANES
    lanes = k.variable(k.filled(I32, LANES))
    with k.loop(whole, step=LANES) as at:
        lanes += (scores.load(at, LANES) >= bound).to(I32, is_signed=False)
    count = k.variable(lanes.get().reduce("add"))
    with k.loop(size, whole) as at:
        count += (scores.load(at) >= bound).to(I32, is_signed=False)
    return count.get()


def _write_chosen(
    k: Function, scores: tuple[Array, Value], bound: Value, count: Value, chosen: Array
) -> Value:
    """Writes the tokens above the bound and the first ones at it, `count` at most, to chosen.
    Returns their number. There are no branches, because they would be unpredictable."""
    numbers, size = scores
    is_exact = _num_reaching(k, numbers, size, bound).equals(count)
    slot, num_above = k.variable(k.index(0)), k.variable(k.index(0))
    with k.loop(size) as token:
        num_above += (numbers.load(token) > bound).to(I64, is_signed=False)
    free = k.variable(count.to(I64) - num_above.get())
    with k.loop(size) as token:
        score = numbers.load(token)
        is_equal = score.equals(bound).to(I64, is_signed=False)
        has_room = (is_exact | (free.get() > 0)).to(I64, is_signed=False)
        is_chosen = (score > bound).to(I64, is_signed=False) | (is_equal & has_room)
        chosen.store(slot.get(), token.to(I32))
        slot += is_chosen & (slot.get() < count.to(I64)).to(I64, is_signed=False)
        free.set(free.get() - is_equal)
    return slot.get().to(I32)
