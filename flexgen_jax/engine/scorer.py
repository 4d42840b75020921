"""Scores texts, and continuations of contexts."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import cast

from flexgen_jax.engine.serving import Serving
from flexgen_jax.errors import UserError
from flexgen_jax.requests.pairs import Context, Split
from flexgen_jax.requests.prompts import PromptReader
from flexgen_jax.requests.requests import EncodedRequest, check_lengths
from flexgen_jax.requests.sampling import SamplingParams
from flexgen_jax.requests.scoring import PairScore, ScoreOutput, Scoring
from flexgen_jax.requests.texts import TextModel

Text = str | Sequence[int]
"""A text, or its token ids."""


class Scorer:
    """Scores with a model.

    shares: whether requests can share a prefix; has_branches: whether a row may have several
    continuations.
    """

    def __init__(
        self,
        model: TextModel,
        serving: Serving,
        prompts: PromptReader,
        shares: bool,
        has_branches: bool,
    ) -> None:
        self._model, self._serving, self._prompts = model, serving, prompts
        self._shares, self._has_branches = shares, has_branches

    def texts(
        self,
        texts: Sequence[str | None],
        ids: Sequence[Sequence[int]],
        through_cache: bool,
        prefix: int = 0,
    ) -> list[ScoreOutput]:
        """Scores texts' tokens; see `LLM.score`. prefix: number of common first tokens, which are
        computed once and not scored."""
        params, requests = SamplingParams(max_tokens=1), []
        shared = (prefix,) if prefix else ()
        for index, row in enumerate(ids):
            first, rest = tuple(row[:1]), tuple(row[1:])
            if through_cache and rest:
                requests.append(EncodedRequest(index, first, params, len(rest), rest))
            else:  # the last token is scored, but nothing follows it
                before, scored = tuple(row[:-1]) or first, rest[prefix:]
                requests.append(
                    EncodedRequest(index, before, params, 1, shared=shared, scored=scored)
                )
        check_lengths([[*r.prompt_ids, *r.forced[1:]] for r in requests], 0, self._model.config)
        return self._requests(requests, texts)

    def _requests(
        self, requests: Sequence[EncodedRequest], texts: Sequence[str | None]
    ) -> list[ScoreOutput]:
        scoring = Scoring()
        self._serving.run_all(requests, scoring)
        return scoring.outputs(texts)

    def pairs(
        self,
        contexts: Sequence[str] | Sequence[Sequence[int]],
        continuations: Sequence[str] | Sequence[Sequence[int]],
        through_cache: bool,
    ) -> list[PairScore]:
        """Scores continuations after their contexts; see `LLM.score_pairs`."""
        if len(contexts) != len(continuations):
            raise UserError(f"{len(contexts)} contexts, but {len(continuations)} continuations")
        rows, lengths = [], []
        for context, continuation in zip(contexts, continuations, strict=True):
            row, count = self._pair(cast("Text", context), cast("Text", continuation))
            max_length = self._model.config.max_positions + (not through_cache)
            if len(row) == count:
                raise UserError(
                    "a context has no tokens; start it with the model's beginning token"
                )
            if not 1 <= count < max_length:
                raise UserError(
                    f"a continuation has {count} tokens, but must have 1 to {max_length - 1} after "
                    "a context"
                )
            rows.append(row[-max_length:])
            lengths.append(count)
        if not rows:
            return []
        _, ids = self._prompts.scorable(None, rows)
        max_length = self._model.config.max_positions if self._has_branches else 0
        split = Split.of(ids, lengths, self._shares and not through_cache, max_length)
        scores: list[PairScore | None] = [None] * len(ids)
        alone = [ids[number] for number in split.alone]
        own_scores = self.texts([None] * len(alone), alone, through_cache, split.prefix)
        for number, score in zip(split.alone, own_scores, strict=True):
            tokens = ids[number][-lengths[number] :]
            scores[number] = PairScore.of(tokens, score.logprobs, score.greedy)
        for alike in split.branched.values():
            self._branches(alike, scores)
        return cast("list[PairScore]", scores)

    def _branches(
        self, contexts: Sequence[Context], scores: MutableSequence[PairScore | None]
    ) -> None:
        """Scores the continuations of contexts that have equally many, of about equal length."""
        requests = [c.encoded(n, self._model.config.pad_id) for n, c in enumerate(contexts)]
        scored = self._requests(requests, [None] * len(requests))
        for context, score in zip(contexts, scored, strict=True):
            start = 0
            for number, tokens in zip(context.numbers, context.continuations, strict=True):
                stop = start + len(tokens)
                columns = slice(start, stop)
                scores[number] = PairScore.of(
                    tokens, score.logprobs[columns], score.greedy[columns]
                )
                start = stop

    def _pair(self, context: Text, continuation: Text) -> tuple[list[int], int]:
        """Returns the tokens of a context and its continuation, and the length of the
        continuation."""
        if not isinstance(context, str) or not isinstance(continuation, str):
            return [*map(int, context), *map(int, continuation)], len(continuation)
        whole = self._model.encode(context + continuation)
        return whole, len(whole) - len(self._model.encode(context.rstrip(" ")))
