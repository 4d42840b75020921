"""Pairs of contexts and continuations to score: common parts of contexts are computed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from flexgen_jax.layers.rotary import Branches
from flexgen_jax.requests.requests import MIN_PREFIX_TOKENS, NOTHING, EncodedRequest, common_length
from flexgen_jax.requests.sampling import SamplingParams

MIN_BRANCH_TOKENS = 8
"""Branches are padded to a power of two, this or more, so that few shapes are compiled."""

Row = Sequence[int]


@dataclass(frozen=True)
class Context:
    """A context, and the numbers and tokens of the continuations that it has."""

    tokens: tuple[int, ...]
    numbers: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def branches(self) -> Branches:
        """The room that its continuations need as branches of one row."""
        longest = max(map(len, self.continuations))
        return Branches(len(self.numbers), max(MIN_BRANCH_TOKENS, 1 << (longest - 1).bit_length()))

    @property
    def computed(self) -> int:
        """Computed tokens of the context and its branches."""
        return len(self.tokens) - 1 + self.branches.total

    @property
    def apart(self) -> int:
        """Tokens that are computed if each continuation has a row of its own."""
        return sum(len(self.tokens) + len(row) - 1 for row in self.continuations)

    def encoded(self, index: int, pad_id: int) -> EncodedRequest:
        """Returns the request that scores all continuations. Each branch begins with the context's
        last token, whose successor is the continuation's first one."""
        ids, scored, branches = list(self.tokens[:-1]), list[int](), self.branches
        for row in self.continuations:
            num_branch_tokens = branches.tokens - len(row)
            ids += [self.tokens[-1], *row[:-1], *[pad_id] * num_branch_tokens]
            scored += [*row, *[NOTHING] * num_branch_tokens]
        params, scored_tokens = SamplingParams(max_tokens=1), tuple(scored)
        return EncodedRequest(index, tuple(ids), params, 1, scored=scored_tokens, branches=branches)


@dataclass(frozen=True)
class Split:
    """How pairs are computed: pairs in `alone` as separate rows with `prefix` common first tokens,
    all other pairs as branches of their contexts."""

    alone: tuple[int, ...]
    prefix: int
    branched: dict[Branches, list[Context]]

    @classmethod
    def of(
        cls, rows: Sequence[Row], lengths: Sequence[int], shares: bool, max_tokens: int
    ) -> Split:
        """Chooses between one common beginning of all contexts and separate contexts, by the number
        of tokens to compute.

        rows: contexts with their continuations; lengths: tokens of the separate contexts; shares:
        whether anything can be shared; max_tokens: tokens of a row with branches, 0 where there can
        be none.
        """
        everything = tuple(range(len(rows)))
        if not shares or len(rows) < 2:
            return cls(everything, 0, {})
        shortest_own = min(len(row) - count for row, count in zip(rows, lengths, strict=True))
        prefix = min(common_length(rows), shortest_own - 1)
        prefix = prefix if prefix >= MIN_PREFIX_TOKENS else 0
        shared_cost = sum(map(len, rows)) - prefix * (len(rows) - 1)
        contexts = [
            context
            for context in _contexts(rows, lengths)
            if len(context.numbers) > 1
            and len(context.tokens) > context.branches.tokens
            and context.computed <= min(max_tokens, context.apart)
        ]
        saved = sum(context.apart - context.computed for context in contexts)
        if not contexts or shared_cost <= sum(map(len, rows)) - saved:
            return cls(everything, prefix, {})
        branched = defaultdict(list)
        for context in contexts:
            branched[context.branches].append(context)
        shared = {number for context in contexts for number in context.numbers}
        return cls(tuple(n for n in everything if n not in shared), 0, dict(branched))


def _contexts(rows: Sequence[Row], lengths: Sequence[int]) -> list[Context]:
    """Returns the contexts that pairs have, each with all of its continuations."""
    numbers = defaultdict(list)
    for number, (row, count) in enumerate(zip(rows, lengths, strict=True)):
        numbers[tuple(row[:-count])].append(number)
    return [
        Context(context, tuple(members), tuple(tuple(rows[n][-lengths[n] :]) for n in members))
        for context, members in numbers.items()
    ]
