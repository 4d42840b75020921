"""Collects the heads' token ids into finished texts."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from flexgen_jax.engine.feed import Source
from flexgen_jax.engine.grammar import Grammars, Matcher
from flexgen_jax.engine.requests import EncodedRequest, Request
from flexgen_jax.engine.stop_strings import Texts
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.progress import Amount

MIN_FINISHED_TEXTS = 8
"""Number of finished completions for estimating the length of others."""

REMEMBERED = 2_000
"""Maximum number of requests whose completion length is kept."""

RECENT = 1 << 16
"""Number of remembered finished ids, so that a late cancel does not hit a new request with the same
id."""

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability, and the likeliest tokens' ids and log-probabilities."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """The continuation of one prompt.

    text: "" if the model has no tokenizer; token_ids: the new tokens, including an end token;
    finish_reason: "stop" for an end token or a stop string, "length" for the limit of tokens,
    "cancelled" by `LLM.cancel`, "error" where the request was impossible; error says why; id: the
    request's; logprobs: those of its tokens, if it asked for them; others: the results of further
    texts, if it asked for several.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    id: str = ""
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    others: tuple[RequestOutput, ...] = ()


OnToken = Callable[[str, int], object]
OnFinished = Callable[[EncodedRequest, "RequestOutput"], object]
OnOutput = Callable[[int, RequestOutput], object]


@dataclass
class _Sequence:
    """A request that is not finished. ids: the text's tokens; logprobs: those of this run's tokens;
    shown: number of tokens that `on_token` has had; matcher: the allowed next tokens, None for
    all."""

    request: EncodedRequest
    ids: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    shown: int = 0
    matcher: Matcher | None = None


class Generation:
    """Collects the tokens of requests until they are finished.

    on_output: called with a request and its result when it is finished; on_token: with the
    request's id and a token; grammars: makes the matchers of JSON schemas. texts: the tokens of
    finished requests, None if there are many. on_later: called with a request that continues in
    another pass, see `EncodedRequest.later`; where there is none, requests have no `later`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        on_output: OnFinished,
        on_token: OnToken | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._grammars = grammars
        self._texts, self._eos_ids = Texts(tokenizer), eos_ids
        self._on_output, self._on_token = on_output, on_token
        self._sequences: dict[int, _Sequence] = {}
        self._ids: set[str] = set()
        self._cancelled: set[str] = set()
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._finished = Done()
        self.on_later: Callable[[Sequence[EncodedRequest]], object] = lambda requests: None
        self.latest_logprob: TokenLogprob | None = None
        self.texts: dict[EncodedRequest, int] | None = {}
        self.num_tokens = 0

    def begin(self, requests: Sequence[EncodedRequest]) -> None:
        """Receives requests before they run."""
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

    def receive(self, requests: Sequence[EncodedRequest], token: int, result: Any) -> list[int]:
        """Takes a token of each request of a batch, int32 [batch, 1], -1 for none, or this with its
        `layers.sampling.log_probabilities`; returns the rows of those that are not finished. token:
        the number of the token."""
        ids, *logprobs = result if isinstance(result, tuple) else (result,)
        for row, (request, chosen_id) in enumerate(zip(requests, ids[:, 0], strict=False)):
            sequence = self._under_way(request)
            if sequence is None or chosen_id < 0:
                continue
            if logprobs and request.params.logprobs is not None:
                token_logprob, top_ids, top = (x[row] for x in logprobs)
                pairs = zip(top_ids.tolist(), top.tolist(), strict=True)
                num_logprobs = request.params.logprobs
                sequence.logprobs.append(
                    TokenLogprob(float(token_logprob), tuple(pairs)[:num_logprobs])
                )
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
        """Returns what changes a request's logits for its next token, and for those after each of
        some guesses; see `SamplingParams.adjustments`."""
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
        """Returns the allowed next tokens of a request, and after each allowed draft token; None if
        all may."""
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
        """Yields the id, the text's tokens and this run's log-probabilities of each request that is
        not finished."""
        for sequence in self._sequences.values():
            yield sequence.request.id, sequence.ids, sequence.logprobs

    def _append(self, sequence: _Sequence, token: int) -> None:
        request = sequence.request
        sequence.ids.append(token)
        if sequence.matcher is not None:
            sequence.matcher.take(token)
        self.num_tokens += 1
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
        )

    def cancel(self, request_id: str) -> None:
        """Finishes a request with its next token, or before its first one if it is still to come;
        nothing if it is finished. May be called from any thread."""
        request_id = str(request_id)
        if request_id in self._ids or request_id not in self._recent:
            self._cancelled.add(request_id)

    def wanted(self, requests: list[EncodedRequest]) -> list[EncodedRequest]:
        """Returns those of some requests that have not begun and are not cancelled; all other
        requests are finished."""
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
        """Returns the requests that are not finished, and drops what was collected for them."""
        for sequence in self._sequences.values():
            earlier_ids = sequence.request.made_ids
            self.num_tokens -= len(sequence.ids) - len(earlier_ids)
            sequence.ids[:] = earlier_ids
            sequence.logprobs.clear()
            sequence.matcher = self._matcher(sequence.request)
        return [sequence.request for _, sequence in sorted(self._sequences.items())]

    def progress(self) -> Amount:
        """Returns how far the requests are that were begun; the remaining length is estimated from
        finished completions."""
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


def failed(request: Request, error: str) -> RequestOutput:
    """Returns the result of an impossible request."""
    prompt_ids = request.prompt_token_ids
    ids = [x for x in prompt_ids if isinstance(x, int)] if isinstance(prompt_ids, Sequence) else []
    return RequestOutput(request.prompt, ids, "", [], "error", str(request.id), error)


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
