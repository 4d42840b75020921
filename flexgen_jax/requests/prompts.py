"""Prompts as users give them: texts or token ids, and what becomes of each a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from flexgen_jax.errors import UserError
from flexgen_jax.models.parts import Pooling
from flexgen_jax.progress import Progress
from flexgen_jax.requests.grammar import Grammars
from flexgen_jax.requests.outputs import RequestOutput, failed
from flexgen_jax.requests.requests import (
    EncodedRequest,
    Encoder,
    Prefix,
    Request,
    check_ids,
    check_prompt,
    in_steps,
    shared_tokens,
    token_ids,
)
from flexgen_jax.requests.sampling import SamplingParams
from flexgen_jax.requests.texts import TextModel

Prompts = str | Sequence[str]

Input = tuple[str | None, Sequence[int] | None] | UserError
"""A prompt's text and its token ids; one may be absent; or why there is no prompt."""

Encode = Callable[[Request, int], EncodedRequest]
"""Checks and encodes a request, given its place among all."""


class PromptReader:
    """Makes requests of prompts.

    shares: whether requests can share a prefix; grammars: for texts that are held to a schema.
    """

    def __init__(
        self, model: TextModel, shares: bool, grammars: Grammars | None, progress: Progress
    ) -> None:
        self._model, self._shares, self._progress = model, shares, progress
        self._tokenizer = model.tokenizer
        self._encoder = Encoder(model.config, model.tokenizer, shares, model.resolved, grammars)

    def inputs(
        self, prompts: Prompts | None, prompt_token_ids: Sequence[Sequence[int]] | None
    ) -> list[Input]:
        """Returns prompts, given as texts or as token ids."""
        if (prompts is None) == (prompt_token_ids is None):
            raise UserError("pass either prompts or prompt_token_ids")
        raw_inputs = prompts if prompt_token_ids is None else prompt_token_ids
        raw_inputs = (
            [raw_inputs] if isinstance(raw_inputs, str) and prompt_token_ids is None else raw_inputs
        )
        if isinstance(raw_inputs, str | bytes | Mapping) or not isinstance(raw_inputs, Iterable):
            raise UserError(f"prompts must be a list, not {type(raw_inputs).__name__}")
        rows = list(raw_inputs)
        if not rows:
            raise UserError("the list of prompts is empty")
        if prompt_token_ids is not None:
            if isinstance(rows[0], int):
                raise UserError(
                    "prompt_token_ids must be a list with a list of token ids for each prompt"
                )
            return [(None, cast("Sequence[int]", row)) for row in rows]
        if self._tokenizer is None:
            self._model.encode("")  # says what to do
        for text in rows:
            check_prompt(text)
        return [(cast("str", text), None) for text in rows]

    def scorable(
        self, prompts: Prompts | None, prompt_token_ids: Sequence[Sequence[int]] | None
    ) -> tuple[list[str | None], list[list[int]]]:
        """Returns texts to score, None where only ids were given, and their token ids."""
        texts, rows = [], []
        for index, (text, ids) in enumerate(cast("Any", self.inputs(prompts, prompt_token_ids))):
            rows.append(self._model.encode(text) if ids is None else token_ids(ids))
            texts.append(text)
            check_ids(rows[-1], index, self._model.config)
        return texts, rows

    def requests(
        self,
        inputs: Sequence[Input],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        pooling: Pooling | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> tuple[list[EncodedRequest], dict[int, RequestOutput]]:
        """Returns prompts as requests, and the results of those that cannot be continued. pooling:
        see `Request`; adapter: the same, of all prompts or of each."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(inputs)
        else:
            params = _listed_params(sampling_params)
        if len(params) != len(inputs):
            raise UserError(f"{len(inputs)} prompts, but {len(params)} sampling_params")
        adapters = [adapter] * len(inputs) if isinstance(adapter, str | None) else adapter
        if len(adapters) != len(inputs):
            raise UserError(f"{len(inputs)} prompts, but {len(adapters)} adapters")
        requests, failures = list[EncodedRequest](), {}
        for index, (prompt, choice) in enumerate(zip(inputs, params, strict=True)):
            if isinstance(prompt, UserError):
                failures[index] = failed(Request(str(index), ""), str(prompt))
                continue
            text, ids = prompt
            is_chat = text is not None and ids is not None
            request = Request(
                id=str(index),
                prompt=text,
                prompt_token_ids=ids if text is None else None,
                sampling_params=choice,
                is_chat=is_chat,
                pooling=pooling,
                adapter=adapters[index],
            )
            encoded = encoded_or_failed(partial(self._encoder.encode, ids=ids), request, index)
            if isinstance(encoded, RequestOutput):
                failures[index] = encoded
            else:
                requests.append(encoded)
        num_shortened = sum(r.whole_limit < r.params.most_tokens for r in requests)
        if num_shortened:
            self._progress.say(
                f"flexgen-jax: {num_shortened} of {len(inputs)} prompts leave room for fewer new "
                "tokens than requested in the model's context of "
                f"{self._model.config.max_positions}"
            )
        return requests, failures

    def sharing(
        self, requests: list[EncodedRequest], prefix: Prefix | None
    ) -> list[EncodedRequest]:
        """Returns requests that know what they share of a prefix.

        A single request shares nothing; see also `runs_share_prefixes`.
        """
        if isinstance(prefix, str):
            if self._tokenizer is None:
                raise UserError("a text prefix needs a tokenizer, but this model has none")
            prefix = self._tokenizer.encode(prefix)
        if not prefix or len(requests) < 2 or not self._shares:
            return requests
        return [
            r if r.is_alone else replace(r, shared=shared_tokens(r.prompt_ids, prefix))
            for r in requests
        ]

    def of_single(self, at_once: int | None = None) -> Encode:
        """Returns how requests of one text each are encoded. at_once: see `EncodedRequest`."""
        at_once = None if self._model.config.short_positions is not None else at_once

        def encode(request: Request, index: int) -> EncodedRequest:
            if request.sampling_params.n > 1:
                raise UserError(
                    "n works in generate and chat; pass the request n times to a stream"
                )
            encoded = self._encoder.encode(request, index)
            return encoded if at_once is None else in_steps(encoded, at_once)

        return encode


def _listed_params(given: object) -> list[SamplingParams]:
    """Returns sampling parameters of each prompt; raises `UserError` for anything else."""
    params = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise UserError(
                "sampling_params must be a SamplingParams object or a list of them, not "
                f"{entry!r}; for example SamplingParams(max_tokens=5)"
            )
    return cast("list[SamplingParams]", params)


def encoded_or_failed(
    encode: Encode, request: Request, index: int
) -> EncodedRequest | RequestOutput:
    """Returns a request encoded, or the result of an impossible one."""
    if not isinstance(request, Request):
        raise UserError(f"a stream needs Request objects, not {request!r}")
    try:
        return encode(request, index)
    except UserError as error:
        return failed(request, str(error))
