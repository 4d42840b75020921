"""Finds the prefixes that prompts share, so that each is computed once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from flexgen_jax.requests.requests import MIN_PREFIX_TOKENS, EncodedRequest

MIN_SAVED_TOKENS = 64
"""Minimum number of saved tokens for a shared prefix."""

MIN_SAVED_SHARE = 0.05
"""The part of all prompts' tokens that sharing must leave out: a batch then takes more steps."""

Ids = tuple[int, ...]


def nothing_stored(ids: Ids) -> int:
    """Returns how many of a prompt's first tokens a KV store has, without one."""
    return 0


def spares_enough(saved: int, requests: Sequence[EncodedRequest]) -> bool:
    """Returns whether the tokens that sharing saves are a large part of all prompts' tokens."""
    return saved >= MIN_SAVED_SHARE * sum(len(r.prompt_ids) for r in requests)


def share(
    requests: Sequence[EncodedRequest],
    prefixes: Iterable[Ids] = (),
    stored: Callable[[Ids], int] = nothing_stored,
    is_worth: Callable[[int, Sequence[EncodedRequest]], bool] = spares_enough,
) -> list[EncodedRequest]:
    """Returns the requests with the lengths of the prefixes that they share with each other or with
    `prefixes`. A prefix that a request names stays shared.

    stored: the number of a prompt's first tokens in a KV store; is_worth:
    whether saving that number of tokens pays.

    Three prompts "abcx", "abcy" and "abd" may share "ab", and the first two "abc".
    """
    requests = [_with_stored(request, stored) for request in requests]
    cuts = _known_prefixes(requests, prefixes)
    saved = sum(shared[-1] for shared in cuts.values())
    shared_requests = sorted(
        (n for n in range(len(requests)) if n not in cuts), key=lambda n: requests[n].prompt_ids
    )
    for first, last, depth, before in _nodes(
        [requests[n].prompt_ids for n in shared_requests], Worth()
    ):
        saved += (last - first - 1) * (depth - before)
        for n in shared_requests[first:last]:
            cuts[n] = (*cuts.get(n, ()), depth)
    if not saved or not is_worth(saved, requests):
        return requests

    def deeper(n: int, r: EncodedRequest) -> tuple[int, ...]:
        return tuple(cut for cut in cuts.get(n, ()) if cut >= r.prefix_len + MIN_PREFIX_TOKENS)

    return [
        r if r.is_alone else replace(r, shared=(*r.shared, *deeper(n, r)))
        for n, r in enumerate(requests)
    ]


def _with_stored(request: EncodedRequest, stored: Callable[[Ids], int]) -> EncodedRequest:
    """Returns a request with the stored prefix, if it is longer than the named prefix."""
    tokens = 0 if request.is_alone else stored(request.prompt_ids[:-1])
    return replace(request, shared=(tokens,)) if tokens > request.prefix_len else request


def _known_prefixes(
    requests: Sequence[EncodedRequest], known: Iterable[Ids]
) -> dict[int, tuple[int, ...]]:
    """Returns the lengths of the known prefixes of each request that has some."""
    prefixes = set(known)
    lengths = sorted({len(ids) for ids in prefixes})
    shared = {
        n: tuple(
            length
            for length in lengths
            if length < len(r.prompt_ids) and r.prompt_ids[:length] in prefixes
        )
        for n, r in enumerate(requests)
    }
    return {n: cuts for n, cuts in shared.items() if cuts}


def groups_of(rows: Sequence[Any], elements: int = 1) -> list[int]:
    """Returns the number of a group for each row, texts or token ids, rows that share a prefix
    having the same; elements: how many of a row's elements make a token.

    For "an apple", "a pear", "an ape" it is 0, 1, 0, if such short prefixes are worth sharing.
    """
    order = sorted(range(len(rows)), key=lambda n: rows[n])
    worth = Worth(MIN_PREFIX_TOKENS * elements, MIN_SAVED_TOKENS * elements)
    groups = {n: place for place, n in enumerate(order)}
    for first, last, _, before in _nodes([rows[n] for n in order], worth):
        if not before:
            groups |= dict.fromkeys(order[first:last], first)
    return [groups[n] for n in range(len(rows))]


class Worth(NamedTuple):
    """When a prefix is worth sharing: the least elements that it has after a shorter one, and
    those that sharing it saves."""

    own: int = MIN_PREFIX_TOKENS
    saved: int = MIN_SAVED_TOKENS


def _nodes(rows: Sequence[Any], worth: Worth) -> Iterator[tuple[int, int, int, int]]:
    """Yields the prefixes that are worth sharing, the shorter ones first: the range of sorted rows
    with the prefix, its length, and its parent's length."""
    common = [_common(a, b) for a, b in pairwise(rows)]
    # Rows that all share the first `depth` tokens; `before` of them are shared already.
    waiting = deque([(0, len(rows), 0, 0)])
    while waiting:
        first, last, depth, before = waiting.popleft()
        for start, stop in _runs(common, first, last, depth):
            deeper = min(common[start : stop - 1])
            own_tokens = deeper - before
            if own_tokens >= worth.own and own_tokens * (stop - start - 1) >= worth.saved:
                yield start, stop, deeper, before
                waiting.append((start, stop, deeper, deeper))
            else:
                waiting.append((start, stop, deeper, before))


def _runs(common: Sequence[int], first: int, last: int, depth: int) -> Iterator[tuple[int, int]]:
    """Yields the longest runs of at least two rows that share more than `depth` tokens with their
    neighbours."""
    start = first
    for stop in range(first + 1, last + 1):
        if stop == last or common[stop - 1] <= depth:
            if stop - start > 1:
                yield start, stop
            start = stop


def _common(first: Any, other: Any) -> int:
    """Returns the length of the common prefix of two rows, at least one short of both."""
    low, high = 0, min(len(first), len(other)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_equal = first[low:middle] == other[low:middle]
        low, high = (middle, high) if is_equal else (low, middle - 1)
    return max(low, 0)
