"""Collects the heads' token ids into finished texts."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.offload.batch import Batch, HeadResult
from flexgen_jax.policy.policy import GREEDY, HeadUse
from flexgen_jax.progress import Amount
from flexgen_jax.requests.collector import Collector, batch_of, targets_of
from flexgen_jax.requests.feed import Source
from flexgen_jax.requests.grammar import Grammars, Matcher
from flexgen_jax.requests.outputs import (
    FinishReason,
    OnFinished,
    OnToken,
    RequestOutput,
    TokenLogprob,
    failed,
)
from flexgen_jax.requests.requests import EncodedRequest, Request
from flexgen_jax.requests.sampling import MAX_LOGPROBS, SamplingParams, sampling_arrays
from flexgen_jax.requests.stop_strings import Texts

MIN_FINISHED_TEXTS = 8
"""Number of finished completions for estimating the length of others."""

REMEMBERED = 2_000
"""Maximum number of requests whose completion length is kept."""

RECENT = 1 << 16
"""Number of remembered finished ids, so that a late cancel does not hit a new request with the same
id."""

LOGPROBS = (0, 5, MAX_LOGPROBS)
"""The numbers of log-probabilities per token that programs are compiled for."""


@dataclass
class _Sequence:
    """A request that is not finished."""

    request: EncodedRequest
    # The text's tokens.
    ids: list[int]
    # Of this run's tokens, and how many of them remain if the request is computed again.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_safe_logprobs: int = 0
    # How many tokens `on_token` has had.
    shown: int = 0
    # The allowed next tokens, None for all.
    matcher: Matcher | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: np.ndarray | None = None
    # How many of the prompt's tokens were not computed for this request.
    num_cached: int = 0


class Generation(Collector):
    """Collects the tokens of requests until they are finished.

    on_output: called with a request and its result when it is finished; on_token: with the
    request's id and a token; grammars: makes the matchers of JSON schemas.
    """

    may_share = True

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        on_output: OnFinished,
        on_token: OnToken | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__()
        self._grammars = grammars
        self._texts, self._eos_ids = Texts(tokenizer), eos_ids
        self._on_output, self._on_token = on_output, on_token
        self._sequences: dict[int, _Sequence] = {}
        self._ids: set[str] = set()
        self._cancelled: set[str] = set()
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._finished = Done()
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def head_of(self, requests: Iterable[EncodedRequest]) -> HeadUse:
        heads = (request.head for request in requests)
        return max(heads, key=lambda head: head.logit_copies, default=GREEDY)

    def batch(self, config: ModelConfig, members: Sequence[EncodedRequest], rows: int) -> Batch:
        batch = batch_of(config, members, rows, uncomputed=1)
        fill = rows - len(members)
        params = [r.params for r in members] + [SamplingParams()] * fill
        places = [r.draws_from for r in members] + [0] * fill
        starts = [r.continued for r in members] + [0] * fill
        batch = replace(
            batch,
            sampling=sampling_arrays(params, places, starts),
            logprobs=_most([p.logprobs for p in params]),
            pooling=next((r.pooling for r in members if r.pooling is not None), None),
        )
        if not any(request.scored for request in members):
            return batch
        return replace(
            batch,
            targets=targets_of(members, batch.ids.shape),
            prompt_logprobs=_most([r.params.prompt_logprobs for r in members if r.scored]),
        )

    def begin(self, requests: Sequence[EncodedRequest]) -> None:
        for request in requests:
            token_ids = list(request.made_ids)
            matcher = self._matcher(request)
            sequence = _Sequence(request, token_ids, shown=len(token_ids), matcher=matcher)
            self._sequences[request.index] = sequence
            self._ids.add(request.id)
            self._recent.pop(request.id, None)

    def _matcher(self, request: EncodedRequest) -> Matcher | None:
        if request.params.schema is None or self._grammars is None:
            return None
        return self._grammars.matcher(request.params.schema, request.given_ids, request.made_ids)

    def receive(
        self, requests: Sequence[EncodedRequest], token: int, result: HeadResult
    ) -> list[int]:
        chosen_ids = result.ids[:, 0]
        for row, (request, chosen_id) in enumerate(zip(requests, chosen_ids, strict=False)):
            sequence = self._under_way(request)
            if sequence is None or chosen_id < 0:
                continue
            if len(sequence.ids) == request.continued:
                sequence.num_cached = min(request.prefix_len, len(request.given_ids))
            num_logprobs = request.params.logprobs
            if result.logprobs is not None and num_logprobs is not None:
                of_token = [x[row] for x in result.logprobs]
                sequence.logprobs.append(_token_logprob(of_token, num_logprobs))
            if result.scores is not None and request.scored:
                sequence.prompt_logprobs = _prompt_logprobs(
                    request, [x[row] for x in result.scores]
                )
            if result.pooled is not None and request.pooling is not None:
                sequence.embedding = result.pooled[row]
            self._append(sequence, int(chosen_id))
        return [row for row, r in enumerate(requests) if self._under_way(r) is not None]

    def _under_way(self, request: EncodedRequest) -> _Sequence | None:
        """Returns the sequence of a request; None if it is finished, or continues as another
        request."""
        sequence = self._sequences.get(request.index)
        return sequence if sequence is not None and sequence.request == request else None

    def adjustments(
        self, request: EncodedRequest, guesses: Sequence[int] = ()
    ) -> list[dict[int, tuple[float, float]]]:
        sequence = self._sequences.get(request.index)
        token_ids = [*([] if sequence is None else sequence.ids), *guesses]
        return [
            request.params.adjustments(
                prompt=request.given_ids,
                generated=token_ids[:count],
                eos_ids=self._eos_ids,
                max_tokens=request.whole_limit,
            )
            for count in range(len(token_ids) - len(guesses), len(token_ids) + 1)
        ]

    def allowed(
        self, request: EncodedRequest, guesses: Sequence[int] = ()
    ) -> list[np.ndarray] | None:
        sequence = self._sequences.get(request.index)
        matcher = None if sequence is None else sequence.matcher
        if matcher is None:
            return None
        masks = [matcher.allowed()]
        ahead = matcher.copy() if guesses else matcher
        for guess in guesses:
            if ahead.is_done or not masks[-1][guess // 32] >> np.uint32(guess % 32) & 1:
                break
            ahead.take(guess)
            masks.append(ahead.allowed())
        return masks

    def unfinished(self) -> Iterator[tuple[str, list[int], list[TokenLogprob]]]:
        for sequence in self._sequences.values():
            yield sequence.request.id, sequence.ids, sequence.logprobs

    def _append(self, sequence: _Sequence, token: int) -> None:
        request = sequence.request
        sequence.ids.append(token)
        if sequence.matcher is not None:
            sequence.matcher.take(token)
        self._num_tokens += 1
        if self._on_token is not None and len(sequence.ids) > sequence.shown:
            has_logprob = request.params.logprobs is not None
            self.latest_logprob = sequence.logprobs[-1] if has_logprob else None
            sequence.shown += 1
            self._on_token(request.id, token)
        result = self._ended(sequence)
        if result is None and request.id in self._cancelled:
            result = self._result(sequence, "cancelled")
        if result is not None:
            self._finish(sequence, result)
        elif len(sequence.ids) == request.whole_limit - request.later:
            sequence.request = request.going_on(sequence.ids)
            sequence.num_safe_logprobs = len(sequence.logprobs)
            self.on_later([sequence.request])

    def _ended(self, sequence: _Sequence) -> RequestOutput | None:
        """Returns a request's result if its last token ends it."""
        request, params = sequence.request, sequence.request.params
        if sequence.matcher is not None and sequence.matcher.error is not None:
            why = f"the JSON schema could not be followed: {sequence.matcher.error}"
            return replace(self._result(sequence, "error"), error=why)
        if sequence.ids[-1] in self._eos_ids and not params.ignore_eos:
            return self._result(sequence, "stop")
        is_stop = self._texts.is_special_stop(sequence.ids, params.stop)
        is_stop = is_stop or sequence.ids[-1] in params.end_ids
        if is_stop and self._texts.content_begin(request, sequence.ids) is not None:
            return self._result(sequence, "stop")
        if sequence.matcher is not None and sequence.matcher.is_done:
            return self._result(sequence, "stop")
        text = self._texts.until_stop(request, sequence.ids) if params.stop else None
        if text is not None:
            return self._result(sequence, "stop", text)
        if len(sequence.ids) >= request.whole_limit:
            return self._result(sequence, "length")
        return None

    def ended(self, request: EncodedRequest) -> RequestOutput | None:
        """Returns the result of a request that an earlier run has made to its end."""
        token_ids = list(request.made_ids)
        if not token_ids:
            return None
        return self._ended(_Sequence(request, token_ids, matcher=self._matcher(request)))

    def _finish(self, sequence: _Sequence, result: RequestOutput) -> None:
        request = sequence.request
        del self._sequences[request.index]
        self._ids.discard(request.id)
        self._cancelled.discard(request.id)
        self._recent[request.id] = None
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        self._finished.add(len(sequence.ids))
        if self.texts is not None:
            self.texts[request] = len(sequence.ids) - request.continued
            self.texts = self.texts if len(self.texts) <= REMEMBERED else None
        self._on_output(request, result)

    def _result(
        self, sequence: _Sequence, reason: FinishReason, text: str | None = None
    ) -> RequestOutput:
        request = sequence.request
        return RequestOutput(
            prompt=request.prompt,
            prompt_token_ids=list(request.given_ids),
            text=self._texts.decode(sequence.request, sequence.ids) if text is None else text,
            token_ids=sequence.ids,
            finish_reason=reason,
            id=request.id,
            logprobs=None if request.params.logprobs is None else sequence.logprobs,
            prompt_logprobs=sequence.prompt_logprobs,
            embedding=sequence.embedding,
            cached_tokens=sequence.num_cached,
        )

    def cancel(self, request_id: str) -> None:
        """Finishes a request with its next token, or before its first one if it is still to come;
        nothing if it is finished. May be called from any thread."""
        request_id = str(request_id)
        if request_id in self._ids or request_id not in self._recent:
            self._cancelled.add(request_id)

    def wanted(self, requests: list[EncodedRequest]) -> list[EncodedRequest]:
        if not self._cancelled:
            return requests
        for request in requests:
            sequence = self._under_way(request)
            if sequence is not None and request.id in self._cancelled:
                self._finish(sequence, self._result(sequence, "cancelled"))
        return [request for request in requests if self._under_way(request) is not None]

    def has(self, request_id: str) -> bool:
        """Returns whether a request with this id is not finished."""
        return request_id in self._ids

    def restart(self) -> list[EncodedRequest]:
        for sequence in self._sequences.values():
            earlier_ids = sequence.request.made_ids
            self._num_tokens -= len(sequence.ids) - len(earlier_ids)
            sequence.ids[:] = earlier_ids
            del sequence.logprobs[sequence.num_safe_logprobs :]
            sequence.matcher = self._matcher(sequence.request)
        return [sequence.request for _, sequence in sorted(self._sequences.items())]

    def progress(self) -> Amount:
        """See `Collector`; the remaining length is estimated from finished completions."""
        expected = self._finished.mean_tokens
        tokens_left = 0.0
        for sequence in self._sequences.values():
            request = sequence.request
            max_tokens, num_made = request.max_tokens, len(sequence.ids) - request.continued
            typical = (
                max_tokens if expected is None else min(max_tokens, max(expected, 1.3 * num_made))
            )
            tokens_left += max(0.0, typical - num_made)
        return Amount(self.num_tokens, self.num_tokens + round(tokens_left), self._finished.count)


def _most(counts: Sequence[int | None]) -> int | None:
    """Returns the number of log-probabilities that a program computes, so that it suffices for all
    requests; None if no request asks for any."""
    asked = [count for count in counts if count is not None]
    return next(n for n in LOGPROBS if n >= max(asked)) if asked else None


def _token_logprob(of_token: Sequence[np.ndarray], count: int) -> TokenLogprob:
    """Returns one token's log-probabilities; of_token: its own, and the ids and log-probabilities
    of the likeliest tokens."""
    logprob, top_ids, top = of_token
    pairs = zip(top_ids.tolist(), top.tolist(), strict=True)
    return TokenLogprob(float(logprob), tuple(pairs)[:count])


def _prompt_logprobs(
    request: EncodedRequest, scores: Sequence[np.ndarray]
) -> list[TokenLogprob | None]:
    """Returns the log-probabilities of a prompt's tokens, None for the first one; scores: of all
    columns of its row, the last ones are the request's."""
    count = request.params.prompt_logprobs or 0
    first = len(scores[0]) - len(request.scored)
    num_scored = len(request.given_ids) - 1
    return [None] + [
        _token_logprob([x[first + n] for x in scores], count) for n in range(num_scored)
    ]


@dataclass
class Done:
    """How many texts are finished, and their tokens."""

    count: int = 0
    tokens: int = 0

    def add(self, tokens: int) -> None:
        self.count += 1
        self.tokens += tokens

    @property
    def mean_tokens(self) -> float | None:
        """The mean length, None as long as few are finished."""
        return self.tokens / self.count if self.count >= MIN_FINISHED_TEXTS else None


class Admitted:
    """The requests of a stream, less those that are impossible, which have a result at once.

    feed: requests that are encoded, or the results of those that cannot be; ready: where results
    go.
    """

    def __init__(
        self,
        feed: Source[EncodedRequest | RequestOutput],
        generation: Generation,
        ready: deque[RequestOutput],
    ) -> None:
        self._feed, self._generation, self._ready = feed, generation, ready

    @property
    def is_ended(self) -> bool:
        return self._feed.is_ended

    def wait(self) -> bool:
        return self._feed.wait()

    def take(self, max_count: int) -> Sequence[EncodedRequest]:
        requests = []
        for request in self._feed.take(max_count):
            if isinstance(request, RequestOutput):
                self._ready.append(request)
            elif self._generation.has(request.id):
                twice = Request(request.id, request.prompt, request.given_ids)
                self._ready.append(failed(twice, f"id {request.id!r} is that of another request"))
            elif (result := self._generation.ended(request)) is not None:
                self._ready.append(result)
            else:
                self._generation.begin([request])
                requests.append(request)
        return requests
