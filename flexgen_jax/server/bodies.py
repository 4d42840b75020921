"""Bodies of requests as texts to make, and the bodies of answers."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flexgen_jax.engine.llm import LLM
from flexgen_jax.errors import TooLongError, UserError
from flexgen_jax.jobs.answers import answer, finish_reason, logprobs_of, tool_call, usage_of
from flexgen_jax.jobs.job import CHAT_TOKENS
from flexgen_jax.jobs.lines import (
    MAX_CHOICES,
    MAX_INPUTS,
    Line,
    LineError,
    OnUnknown,
    Prompt,
    read_line,
)
from flexgen_jax.models.answer_stream import AnswerStream, PlainStream
from flexgen_jax.models.text_reader import Piece
from flexgen_jax.models.tool_calls import ToolCall
from flexgen_jax.requests.outputs import RequestOutput, TokenLogprob
from flexgen_jax.requests.requests import Request
from flexgen_jax.server.errors import RefusedError

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def chat_tokens_of(llm: LLM) -> int | None:
    """Returns how many tokens an answer has at most whose request does not say; None for the model
    folder's default."""
    return None if llm.sampling_defaults.max_tokens is not None else CHAT_TOKENS


def requests_of(line: Line, llm: LLM, next_id: Callable[[], str]) -> list[Request]:
    """Returns the texts that a line asks for; raises `RefusedError` for impossible requests."""
    # With a seed, a text depends on nothing else that the server has done.
    first = 0 if line.has_seed else secrets.randbelow(1 << 30)
    requests = []
    try:
        for prompt in _prompts_of(line, llm):
            request = line.request(next_id(), prompt, llm)
            requests.append(replace(request, prompt=None, prompt_token_ids=llm.check(request)))
    except TooLongError as error:
        raise _too_long(error) from error
    except UserError as error:
        raise RefusedError(400, without_paths(str(error), llm)) from None
    choices = (request for request in requests for _ in range(line.count))
    return [
        replace(request, id=next_id(), place=first + choice)
        for choice, request in enumerate(choices)
    ]


def without_paths(message: str, llm: LLM) -> str:
    """Returns a message that names the model's folder without its path."""
    return message.replace(llm.name, Path(llm.name).name)


def _prompts_of(line: Line, llm: LLM) -> list[Prompt]:
    try:
        return line.prompts_for(llm, datetime.now())
    except TooLongError:
        raise
    except Exception as error:  # whatever a template does with what a client says
        raise RefusedError(400, without_paths(str(error), llm)) from None


def _too_long(error: TooLongError) -> RefusedError:
    """Returns the error of a prompt that does not fit, in the words by which clients know it."""
    message = f"This model's maximum context length is {error.limit + 1} tokens, with at least one "
    message += f"new token. However, your prompt has {error.tokens} tokens; shorten it."
    return RefusedError(400, message, "context_length_exceeded")


MAX_TEMPERATURE = 2
"""The highest temperature of OpenAI's interface."""


class Asked:
    """What a request's body asks for.

    streams: whether the answer comes in pieces; counts: whether these end with the number of
    tokens.
    """

    def __init__(
        self,
        content: bytes,
        url: str,
        llm: LLM,
        names: tuple[str, ...],
        on_unknown: OnUnknown | None = None,
    ) -> None:
        """Raises `RefusedError` with the body's problem."""
        body = object_of(content)
        streams = body.pop("stream", None) or False
        options = body.pop("stream_options", None) or {}
        if not isinstance(streams, bool):
            raise RefusedError(400, f'"stream" must be true or false, not {streams!r}')
        if not isinstance(options, dict):
            raise RefusedError(400, f'"stream_options" must be an object, not {options!r}')
        self.streams, self.counts = streams, bool(options.get("include_usage", False))
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self._llm = llm
        # By the text's index: calls, log-probabilities for the next chunk, and characters so far.
        self._num_calls: Counter[int] = Counter()
        self._logprobs: defaultdict[int, list[tuple[int, TokenLogprob]]] = defaultdict(list)
        self._text_offset: Counter[int] = Counter()
        temperature = body.get("temperature")
        if isinstance(temperature, int | float) and temperature > MAX_TEMPERATURE:
            message = f'"temperature" must be at most {MAX_TEMPERATURE}, not {temperature}'
            raise RefusedError(400, message)
        limit = max(llm.config.max_positions, MAX_CHOICES, MAX_INPUTS)
        for name in ("prompt", "messages", "input"):
            if isinstance(body.get(name), list) and len(body[name]) > limit:
                message = f'"{name}" has {len(body[name])} entries; the model takes {limit} at most'
                raise RefusedError(400, message)
        if "chat_template" in body:  # a program, which may never end
            raise RefusedError(400, '"chat_template" is not accepted from clients')
        line = {"custom_id": self.id, "method": "POST", "url": url, "body": body}
        try:
            self.line: Line = read_line(
                json.dumps(line).encode(), 1, chat_tokens_of(llm), 0, on_unknown
            )
        except (LineError, RecursionError) as error:
            raise RefusedError(400, str(error)) from None
        is_whole = self.line.echoes or not self.line.has_text or self.line.form == "embeddings"
        if self.streams and is_whole:
            message = '"stream" cannot be combined with embeddings, "echo" or "max_tokens": 0'
            raise RefusedError(400, message)
        if self.line.model is not None and self.line.model not in names:
            message = f"the model {self.line.model!r} does not exist; there is {names[0]!r}"
            raise RefusedError(404, message, "model_not_found")
        self.line = replace(self.line, model=self.line.model or names[0])

    def answer(self, results: list[RequestOutput]) -> dict[str, Any]:
        """Returns the body of a whole answer."""
        record = answer(self.line, results, self._llm, self.id)
        body: dict[str, Any] = record["response"]["body"]
        return body

    def stream_of(self, request: Request, prompt_ids: list[int]) -> AnswerStream:
        """Returns the converter from a completion's tokens to text pieces."""
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None, "the model has texts"
        stops = self._llm.resolved(request.sampling_params, len(prompt_ids)).stop
        if self.line.form == "chat":
            return AnswerStream(tokenizer, prompt_ids, stops, self.line.tools)
        return PlainStream(tokenizer, prompt_ids, stops)

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Returns a piece of an answer."""
        is_chat = self.line.form == "chat"
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}_{self.id[:12]}_1",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": self.created,
            "model": self.line.model,
            "choices": choices,
            **({"usage": None} if self.counts else {}),
            **more,
        }

    def opening(self, index: int) -> Iterator[dict[str, Any]]:
        """Yields the pieces before a completion: a conversation's role."""
        if self.line.form == "chat":
            yield self.chunk([self._choice(index, {"role": "assistant", "content": ""})])

    def note_logprob(self, index: int, token: int, logprob: TokenLogprob | None) -> None:
        """Keeps the log-probabilities of a text's token for its next chunk."""
        if logprob is not None:
            self._logprobs[index].append((token, logprob))

    def pieces(self, index: int, pieces: list[Piece]) -> Iterator[dict[str, Any]]:
        """Yields chunks of pieces of a text; the first has the log-probabilities so far."""
        for piece in self.shown(pieces):
            logprobs = self._taken_logprobs(index)
            if self.line.form == "chat":
                yield self.chunk([self._choice(index, self._delta(index, piece), None, logprobs)])
            else:
                yield self.chunk([self._plain(index, piece.text, None, logprobs)])

    def shown(self, pieces: list[Piece]) -> list[Piece]:
        """Returns the pieces that the request asks for."""
        return [p for p in pieces if self.line.shows_reasoning or p.kind != "reasoning"]

    @property
    def model(self) -> str:
        """The model's name in the answer."""
        return self.line.model or Path(self._llm.name).name

    def _taken_logprobs(self, index: int) -> Any:
        """Returns the log-probabilities of tokens that no chunk has had yet, in OpenAI's form."""
        pairs, self._logprobs[index] = self._logprobs[index], []
        if not pairs:
            return None
        result = RequestOutput(None, [], "", [n for n, _ in pairs], "stop")
        logprobs = logprobs_of(
            replace(result, logprobs=[x for _, x in pairs]), self.line, self._llm
        )
        if logprobs is not None and "text_offset" in logprobs:
            begin = self._text_offset[index]
            logprobs["text_offset"] = [begin + n for n in logprobs["text_offset"]]
            shown = b"".join(
                b"" if self._llm.is_hidden(n) else self._llm.piece(n) for n, _ in pairs
            )
            self._text_offset[index] += len(shown.decode(errors="ignore"))
        return logprobs

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """Returns a piece as a change of a message."""
        if piece.kind in ("content", "reasoning"):
            return {"content" if piece.kind == "content" else "reasoning_content": piece.text}
        if piece.kind == "arguments":
            number = self._num_calls[index] - 1
            return {"tool_calls": [{"index": number, "function": {"arguments": piece.text}}]}
        number = self._num_calls[index]
        self._num_calls[index] += 1
        call = ToolCall(piece.text, "", piece.call_id)
        named = tool_call(call, f"{self.id} {index}", number)
        return {"tool_calls": [{"index": number, **named}]}

    def closing(self, index: int, result: RequestOutput) -> dict[str, Any]:
        """Returns the last chunk of a text, which says why it ended."""
        logprobs = self._taken_logprobs(index)
        if self.line.form == "chat":
            reason = finish_reason(result, self._num_calls[index] > 0)
            return self.chunk([self._choice(index, {}, reason, logprobs)])
        return self.chunk([self._plain(index, "", result.finish_reason, logprobs)])

    def usage(self, results: list[RequestOutput]) -> dict[str, Any]:
        """Returns the chunk that counts tokens."""
        return self.chunk([], usage=usage_of(self.line, results))

    def _choice(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _plain(
        self, index: int, text: str, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def object_of(content: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body; raises `RefusedError` for anything else."""
    try:
        body = json.loads(content.decode("utf-8"))
    except (UnicodeError, ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedError(400, f"the body must be a JSON object, not {type(body).__name__}")
    return body


def own_id(call_id: Any, prefix: str) -> Any:
    """Returns a call's id without the prefix of a client's interface, which templates do not
    know."""
    return call_id.removeprefix(prefix) if isinstance(call_id, str) else call_id


MAX_TOKENIZED = 1_000_000
"""Tokens of a text that a client may have counted."""


def tokens_of(content: bytes, llm: LLM) -> list[int]:
    """Returns the tokens of the prompt or the messages of a body."""
    body = object_of(content)
    prompt, messages = body.get("prompt"), body.get("messages")
    try:
        if isinstance(prompt, str) and messages is None:
            return llm.encode(prompt, max_tokens=MAX_TOKENIZED)
        is_list = isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages)
        if prompt is None and is_list and messages:
            return llm.chat_prompt(messages)[1]
    except Exception as error:  # whatever a template does with what a client says
        raise RefusedError(400, without_paths(str(error), llm)) from None
    raise RefusedError(400, 'the body needs "prompt" (a string) or "messages" (a list of messages)')


def text_of(content: bytes, llm: LLM) -> str:
    """Returns the text of the tokens of a body."""
    tokens, tokenizer = object_of(content).get("tokens"), llm.tokenizer
    vocab_size = llm.config.vocab_size
    is_good = isinstance(tokens, list) and all(
        isinstance(t, int) and not isinstance(t, bool) and 0 <= t < vocab_size for t in tokens
    )
    if not is_good or tokenizer is None:
        raise RefusedError(400, f'"tokens" must be a list of token ids below {vocab_size}')
    return tokenizer.decode(tokens or [])
