"""The routes of `/v1/messages` and `/v1/responses`, which are conversations in other forms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from flexgen_jax.models.text_reader import Piece
from flexgen_jax.requests.outputs import RequestOutput
from flexgen_jax.requests.requests import Request as EngineRequest
from flexgen_jax.server import messages, responses
from flexgen_jax.server.bodies import CHAT, Asked, object_of, requests_of
from flexgen_jax.server.conversations import in_turns
from flexgen_jax.server.engine import Engine, Text
from flexgen_jax.server.errors import RefusedError
from flexgen_jax.server.kept import Handler
from flexgen_jax.server.streams import (
    Cancelling,
    Event,
    event_bytes,
    event_response,
    events_of,
    results_of,
    unless_gone,
)


class Writer(Protocol):
    """Writes an answer in the form of an interface, as events; `body` is the whole answer."""

    body: dict[str, Any]

    def begin(self) -> Iterator[Event]: ...

    def add(self, pieces: Sequence[Piece]) -> Iterator[Event]: ...

    def end(self, result: RequestOutput, stop: str | None, /) -> Iterator[Event]: ...

    def fail(self, message: str) -> Iterator[Event]: ...


class Dialect(NamedTuple):
    """An interface. chat_body: makes the body of a conversation; writer: writes the answer, given
    its id, the model's name and the prompt's number of tokens; named: gives an error the message by
    which the interface's clients know it."""

    chat_body: Callable[[Mapping[str, Any]], dict[str, Any]]
    writer: Callable[[str, str, int], Writer]
    named: Callable[[RefusedError], RefusedError]


MESSAGES = Dialect(messages.chat_body, messages.MessageWriter, messages.named)
RESPONSES = Dialect(responses.chat_body, responses.ResponseWriter, lambda error: error)

Read = Callable[[Request, Callable[[bytes], Any]], Any]
Submit = Callable[[list[EngineRequest]], list[Text]]


class ChatRequest(NamedTuple):
    """A request as a conversation. request: its one text; model: the model's name in it."""

    asked: Asked
    request: EngineRequest
    model: str


class Dialects:
    """The handlers of the routes.

    ask: makes a conversation's `Asked` of a body; submit: hands requests to the engine.
    """

    def __init__(
        self, engine: Engine, read: Read, ask: Callable[[bytes, str], Asked], submit: Submit
    ) -> None:
        self._engine, self._read, self._ask, self._submit = engine, read, ask, submit

    @property
    def routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("POST", "/v1/messages", lambda request: self._answer(request, MESSAGES)),
            ("POST", "/v1/messages/count_tokens", self.count_tokens),
            ("POST", "/v1/responses", lambda request: self._answer(request, RESPONSES)),
        ]

    def _chat_request(self, content: bytes, dialect: Dialect) -> ChatRequest:
        body = object_of(content)
        model = body.get("model")
        chat = dialect.chat_body(body)
        chat["messages"] = in_turns(chat["messages"])
        if model in self._engine.llm.config.adapter_names:
            chat["model"] = model
        asked = self._ask(json.dumps(chat).encode(), CHAT)
        try:
            requests = requests_of(asked.line, self._engine.llm, self._engine.next_id)
        except RefusedError as error:
            raise dialect.named(error) from None
        if len(requests) != 1:
            raise RefusedError(400, '"n" must be 1')
        return ChatRequest(asked, requests[0], model if isinstance(model, str) else asked.model)

    async def count_tokens(self, request: Request) -> Response:
        """Answers with the number of a conversation's tokens."""
        chat = await self._read(request, lambda content: self._chat_request(content, MESSAGES))
        return JSONResponse({"input_tokens": len(chat.request.prompt_token_ids or ())})

    async def _answer(self, request: Request, dialect: Dialect) -> Response:
        chat = await self._read(request, lambda content: self._chat_request(content, dialect))
        asked, prompt_ids = chat.asked, list(chat.request.prompt_token_ids or ())
        writer = dialect.writer(asked.id, chat.model, len(prompt_ids))
        texts = self._submit([chat.request])
        if asked.streams:
            events = self._events(chat, writer, texts)
            return event_response(
                self._engine, texts, events, lambda error: _bytes_of(writer.fail(str(error)))
            )
        with Cancelling(self._engine, texts):
            (result,) = await unless_gone(request, results_of(texts))

        def whole() -> dict[str, Any]:
            stream = asked.stream_of(chat.request, prompt_ids)
            pieces = [piece for token in result.token_ids for piece in stream.add(token)]
            _drain(writer.add(asked.shown([*pieces, *stream.end()])))
            _drain(writer.end(result, self._stop_of(chat, result)))
            return writer.body

        return JSONResponse(await asyncio.to_thread(whole))

    async def _events(
        self, chat: ChatRequest, writer: Writer, texts: list[Text]
    ) -> AsyncIterator[bytes]:
        """Yields an answer as server-sent events."""
        stream = chat.asked.stream_of(chat.request, list(chat.request.prompt_token_ids or ()))
        for event in _bytes_of(writer.begin()):
            yield event
        async for _, token in events_of(texts):
            pieces = stream.end() if isinstance(token, RequestOutput) else stream.add(token)
            for event in _bytes_of(writer.add(chat.asked.shown(pieces))):
                yield event
            if isinstance(token, RequestOutput):
                for event in _bytes_of(writer.end(token, self._stop_of(chat, token))):
                    yield event

    def _stop_of(self, chat: ChatRequest, result: RequestOutput) -> str | None:
        """Returns the stop string that ended an answer; None for another end."""
        stops, llm = chat.asked.line.params.stop, self._engine.llm
        if result.finish_reason != "stop" or not stops or llm.tokenizer is None:
            return None
        whole = llm.tokenizer.decode(result.token_ids, before=result.prompt_token_ids)
        cut = whole[len(result.text) :]
        return next((stop for stop in stops if cut.startswith(stop)), None)


def _bytes_of(events: Iterator[Event]) -> Iterator[bytes]:
    return (event_bytes(body, name) for name, body in events)


def _drain(events: Iterator[Event]) -> None:
    for _ in events:
        pass
