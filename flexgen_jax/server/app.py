"""The routes of the server."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flexgen_jax.engine.llm import LLM
from flexgen_jax.progress import logger
from flexgen_jax.requests.outputs import RequestOutput
from flexgen_jax.requests.requests import Request as EngineRequest
from flexgen_jax.server.bodies import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Asked,
    requests_of,
    text_of,
    tokens_of,
)
from flexgen_jax.server.dialects import Dialects
from flexgen_jax.server.engine import Engine, OverloadedError, Text
from flexgen_jax.server.errors import RefusedError, error_body, on_failure, on_http, on_refused
from flexgen_jax.server.incoming import Bodies, check_site
from flexgen_jax.server.kept import Handler, Kept
from flexgen_jax.server.metrics import metrics_of
from flexgen_jax.server.page import page
from flexgen_jax.server.streams import (
    Cancelling,
    event_bytes,
    event_response,
    events_of,
    results_of,
    unless_gone,
)

MAX_IGNORED = 100
"""The maximum number of unknown fields that are logged."""

RETRY_S = 5
"""Seconds after which a rejected client may retry."""


@dataclass(frozen=True)
class ServerOptions:
    """How a server serves.

    name: an additional name of the model; api_key: what clients must send, None for nothing; most:
    texts that may be under way or wait; folder: where files and batches are kept, None to have
    none; lengths: of prompts and new tokens that the first plan has room for; is_local: whether
    only this machine can connect, without a key, so that other sites' pages must be refused;
    allowed_origins: of web apps that may use the server, "*" for all; is_strict: whether unknown
    fields of requests are refused.
    """

    name: str | None = None
    api_key: str | None = None
    most: int = 1024
    folder: Path | None = None
    lengths: tuple[int, int] = (1024, 512)
    is_local: bool = False
    allowed_origins: tuple[str, ...] = ()
    is_strict: bool = False


class Server:
    """The handlers of all routes, around one engine."""

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self.llm, self.engine = llm, Engine(llm, options.most, options.lengths)
        last = Path(llm.name).name
        own_names = (last, llm.name) if Path(llm.name).exists() else (llm.name, last)
        names = (*([options.name] if options.name else ()), *own_names, *_without_format(last))
        self.names = tuple(dict.fromkeys(names))
        self._options, self._key = options, options.api_key
        self._bodies = Bodies()
        self._ignored: set[str] = set()
        self._dialects = Dialects(self.engine, self._bodies.read, self._ask, self._submit)
        self._kept: Kept | None = None
        if options.folder is not None:
            self._kept = Kept(options.folder, self.engine, self._bodies)

    def app(self) -> Starlette:
        """Returns the application."""
        routes: list[tuple[str, str, Handler]] = [
            ("POST", CHAT, self.complete),
            ("POST", COMPLETIONS, self.complete),
            ("POST", EMBEDDINGS, self.complete),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{name:path}", self.model),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/status", self.status),
            ("GET", "/metrics", self.metrics),
            *self._dialects.routes,
            *(self._kept.routes if self._kept is not None else ()),
        ]
        handlers: dict[Any, Any] = {
            RefusedError: on_refused,
            HTTPException: on_http,
            Exception: on_failure,
        }
        guarded = [
            Route(path, self._guarded(handler), methods=[method])
            for method, path, handler in routes
        ]
        free = [Route("/health", self.health), Route("/", page)]
        app = Starlette(
            routes=[*guarded, *free], exception_handlers=handlers, lifespan=self._lifespan
        )
        if self._options.allowed_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self._options.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        if self._kept is not None:
            self._kept.batches.start()
        yield
        if self._kept is not None:
            await self._kept.batches.stop()
        await asyncio.to_thread(self.engine.stop)

    def _guarded(self, handler: Handler) -> Handler:
        """Returns a handler that answers those alone who have the key."""

        async def guarded(request: Request) -> Response:
            if {"content-length", "transfer-encoding"} <= {*request.headers}:
                message = "a body has Content-Length or Transfer-Encoding, not both"
                raise RefusedError(400, message, headers={"Connection": "close"})
            if self._options.is_local:
                check_site(request, self._options.allowed_origins)
            if self._key is not None:
                scheme, _, token = request.headers.get("authorization", "").partition(" ")
                if "x-api-key" in request.headers:  # of Anthropic's clients
                    scheme, token = "bearer", request.headers["x-api-key"]
                is_right = secrets.compare_digest(token.strip().encode(), self._key.encode())
                if scheme.lower() != "bearer" or not is_right:
                    message = "the API key is missing or wrong: send Authorization: Bearer KEY"
                    raise RefusedError(
                        401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"}
                    )
            return await handler(request)

        return guarded

    # Texts

    async def complete(self, request: Request) -> Response:
        """Answers a conversation, completes prompts or makes vectors, at once or in pieces."""
        engine = self.engine

        def read(body: bytes) -> tuple[Asked, list[EngineRequest]]:
            completion = self._ask(body, request.url.path)
            return completion, requests_of(completion.line, self.llm, engine.next_id)

        asked, requests = await self._bodies.read(request, read)
        texts = self._submit(requests)
        if asked.streams:
            return event_response(
                engine, texts, _events(asked, texts), lambda error: [_error_event(error), DONE]
            )
        with Cancelling(engine, texts):
            results = await unless_gone(request, results_of(texts))
        return JSONResponse(await asyncio.to_thread(asked.answer, results))

    def _ask(self, body: bytes, path: str) -> Asked:
        """Reads a body of a route."""
        on_unknown = None if self._options.is_strict else self._ignore
        names = (*self.names, *self.llm.config.adapter_names)
        return Asked(body, path, self.llm, names, on_unknown)

    def _submit(self, requests: list[EngineRequest]) -> list[Text]:
        """Submits requests; raises `RefusedError` if the server cannot take them now."""
        if self.engine.is_broken:
            raise RefusedError(503, "the engine failed; see the server's log")
        try:
            return self.engine.submit(requests)
        except OverloadedError:
            message = f"the server is busy: {self.engine.waiting} texts wait; try again later"
            raise RefusedError(429, message, "overloaded", {"Retry-After": str(RETRY_S)}) from None

    def _ignore(self, name: str) -> None:
        """Logs the name of an unknown field, once."""
        if name not in self._ignored and len(self._ignored) < MAX_IGNORED:
            self._ignored.add(name)
            logger().warning('flexgen-jax: ignoring the unknown field "%s" of requests', name)

    # About the server

    async def models(self, _request: Request) -> Response:
        names = (self.names[0], *self.llm.config.adapter_names)
        data = [_model(name, self.llm) for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in (*self.names, *self.llm.config.adapter_names):
            raise RefusedError(404, f"the model {name!r} does not exist", "model_not_found")
        return JSONResponse(_model(name, self.llm))

    async def tokenize(self, request: Request) -> Response:
        tokens = await self._bodies.read(request, lambda body: tokens_of(body, self.llm))
        max_tokens = self.llm.config.max_positions
        return JSONResponse({"count": len(tokens), "max_model_len": max_tokens, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        text = await self._bodies.read(request, lambda body: text_of(body, self.llm))
        return JSONResponse({"prompt": text})

    async def health(self, _request: Request) -> Response:
        fault = "the engine failed" if self.engine.is_broken else self.engine.fault
        return JSONResponse({"status": fault or "ok"}, 503 if fault else 200)

    async def status(self, _request: Request) -> Response:
        """What the page shows."""
        engine, policy = self.engine, self.llm.policy
        return JSONResponse(
            {
                "model": self.names[0],
                "running": engine.running,
                "waiting": engine.waiting,
                "tokens_per_s": round(engine.tokens_per_s, 2),
                "texts": engine.counts.texts,
                "new_tokens": engine.counts.new_tokens,
                "policy": None if policy is None else policy.in_words,
                "machine": self.llm.machine,
                "jobs": [] if self._kept is None else self._kept.batches.progress(),
                "talks": True,
            }
        )

    async def metrics(self, _request: Request) -> Response:
        content, content_type = metrics_of(self.engine, self.names[0])
        return Response(content, media_type=content_type)


def _without_format(name: str) -> tuple[str, ...]:
    """Returns a GGUF file's name without its ending, and without the type of its blocks, too."""
    stem = name.removesuffix(".gguf")
    if stem == name:
        return ()
    return stem, re.sub(r"[.-](I?Q\d\w*|B?F16|F32|MXFP4)$", "", stem, flags=re.IGNORECASE)


DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


async def _events(asked: Asked, texts: list[Text]) -> AsyncIterator[bytes]:
    """Yields an answer as server-sent events."""
    async for chunk in _chunks(asked, texts):
        yield event_bytes(chunk)
    yield DONE


def _error_event(error: RefusedError) -> bytes:
    return event_bytes(error_body(error.status, str(error), error.code))


async def _chunks(asked: Asked, texts: list[Text]) -> AsyncIterator[dict[str, Any]]:
    """Yields the chunks of all texts."""
    streams = [
        asked.stream_of(text.request, list(text.request.prompt_token_ids or ())) for text in texts
    ]
    results: dict[int, RequestOutput] = {}
    for number in range(len(texts)):
        for chunk in asked.opening(number):
            yield chunk

    async for number, event in events_of(texts):
        stream = streams[number]
        if isinstance(event, RequestOutput):
            made, logprob = stream.end(), None
        else:
            logprobs = texts[number].logprobs
            made, logprob = stream.add(event), logprobs.popleft() if logprobs else None
            asked.note_logprob(number, event, logprob)
        for chunk in asked.pieces(number, made):
            yield chunk
        if isinstance(event, RequestOutput):
            results[number] = event
            yield asked.closing(number, event)
    if asked.counts:
        yield asked.usage([result for _, result in sorted(results.items())])


def _model(name: str, llm: LLM) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "flexgen-jax",
        "max_model_len": llm.config.max_positions,
    }
