"""A row's softmax."""

from __future__ import annotations

from flexgen_jax.cpu.jit.emit import F32, I32, Array, Function, Value
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.vectors import exp, lane_sum


def cap(k: Function, scores: Array, begin: Value, end: Value, softcap: Value) -> None:
    """Bounds the scores from begin to end, if softcap is not 0: softcap * tanh(score / softcap).
    Up to `LANES` elements before and after them are overwritten."""
    with k.when(softcap > 0.0), k.loop(end, begin // LANES * LANES, step=LANES) as at:
        score = scores.load(at, LANES)
        size = (score < 0.0).select(k.filled(F32, LANES) - score, score)
        power = exp(size * -2.0 / softcap)
        bounded = softcap * (1.0 - power) / (power + 1.0)
        scores.store(at, (score > 0.0).select(bounded, k.filled(F32, LANES) - bounded))


def weigh(
    k: Function, scores: Array, tokens: tuple[Value, Value], room: Value, peak: Value
) -> tuple[Value, Value]:
    """Replaces scores by exp(score - highest), where highest is the maximum of the valid scores and
    of peak, and returns highest and the sum of the new values.

    tokens: where the valid ones begin and end. Other elements below `room`, a multiple of `LANES`,
    become 0. The order of the sum depends on the tokens' indices, not on the range.
    """
    begin, end = tokens
    lanes, (first, last) = k.table(I32, range(LANES)), (x.to(I32) for x in (begin, end))

    def is_valid(at: Value) -> Value:
        token = at.to(I32) + lanes
        return (token >= first) & (token < last)

    lowest = begin // LANES * LANES
    scores.fill(lowest.minimum(room))
    highest = k.variable(peak.spread(LANES))
    with k.loop(room, lowest, step=LANES) as at:
        score = scores.load(at, LANES)
        is_larger = score > highest.get()  # never for NaN, which the sum shows
        highest.set((is_valid(at) & is_larger).select(score, highest.get()))
    top = highest.get().reduce("fmax", ("nnan",))
    total = k.variable(k.filled(F32, LANES))
    with k.loop(room, lowest, step=LANES) as at:
        weight = is_valid(at).select(exp(scores.load(at, LANES) - top), 0.0)
        scores.store(at, weight)
        total += weight
    return top, lane_sum(total.get())
