"""Requests of real clients: unknown fields, other sites' pages, long waits, log-probabilities."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import httpx

from flexgen_jax import Policy
from flexgen_jax.server import streams
from flexgen_jax.server.app import Server
from tests.helpers.serving import serving
from tests.helpers.writing import write_author

POLICY = Policy(batch_size=2, num_batches=1)
TEXT = "Hello world, that is all."
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "max_tokens": 40,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_author(tmp_path_factory.mktemp("author"), [TEXT])


@pytest.fixture(scope="module")
def local(model: Path) -> Iterator[tuple[str, Server]]:
    with serving(model, POLICY, is_local=True) as served:
        yield served


def ask(address: str, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{address}{path}", json={**ASKED, **body}, timeout=60)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [
        json.loads(event.removeprefix("data: "))
        for event in response.text.split("\n\n")
        if event.startswith("data: {")
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"session_id": "x"},
        {"options": {}, "keep_alive": "5m", "cache_prompt": True},
        {"reasoning": {}},
        {"thinking": {"type": "disabled"}},
        {"repeat_penalty": 1.1},
        {"stop": ""},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_fields_of_other_servers_are_taken(local: tuple[str, Server], more: dict[str, Any]) -> None:
    answer = ask(local[0], **more)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == TEXT


def test_unknown_fields_are_refused_where_asked(model: Path) -> None:
    with serving(model, POLICY, is_strict=True) as (address, _):
        refused = ask(address, session_id="x")
        assert refused.status_code == 400
        assert "session_id" in refused.json()["error"]["message"]
        assert ask(address).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Origin": "null"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(
    local: tuple[str, Server], headers: dict[str, str], status: int
) -> None:
    content = json.dumps(ASKED)
    all_headers = {"Content-Type": "application/json", **headers}
    answer = httpx.post(f"{local[0]}/v1/chat/completions", content=content, headers=all_headers)
    assert answer.status_code == status


def test_an_allowed_origin_may_ask(model: Path) -> None:
    origin = "http://localhost:3000"
    with serving(model, POLICY, is_local=True, allowed_origins=(origin,)) as (address, _):
        url, headers = f"{address}/v1/chat/completions", {"Origin": origin}
        asks = {**headers, "Access-Control-Request-Method": "POST"}
        assert httpx.options(url, headers=asks).headers["access-control-allow-origin"] == origin
        answer = httpx.post(url, json=ASKED, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin


def test_the_page_may_not_be_framed(local: tuple[str, Server]) -> None:
    headers = httpx.get(local[0]).headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_a_stream_begins_at_once_and_says_that_it_lives(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the prompt waits; a later error is an event."""
    monkeypatch.setattr(streams, "PING_S", 0.05)
    with serving(model, POLICY) as (address, server):
        stream = server.llm.stream

        def slow(requests: Any, *more: Any) -> Any:
            first = next(requests)
            time.sleep(0.5)
            if first.sampling_params.max_tokens == 7:
                raise RuntimeError("broken")
            yield from stream(iter([first]), *more)

        server.llm.stream = slow  # type: ignore[method-assign]
        ask(address)  # ends the stream that was begun before
        server.engine._asked.put(None)
        for max_tokens, ending in ((40, '"finish_reason": "stop"'), (7, "broken")):
            body = {**ASKED, "stream": True, "max_tokens": max_tokens}
            began = time.monotonic()
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=body) as answer:
                assert time.monotonic() - began < 0.4
                assert answer.headers["cache-control"] == "no-cache"
                assert answer.headers["x-accel-buffering"] == "no"
                text = answer.read().decode()
            assert text.count(": ping\n\n") >= 3
            assert ending in text
            assert text.endswith("data: [DONE]\n\n")


def test_lines_do_not_end_within_an_event(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d"
    model = write_author(tmp_path / "m", [text])
    with serving(model, POLICY) as (address, _):
        answer = ask(address, stream=True)
        assert not {"\u2028", "\u2029", "\u0085"} & {*answer.text}
        deltas = (x["delta"] for event in events(answer) for x in event["choices"])
        assert "".join(delta.get("content") or "" for delta in deltas) == text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_pieces_have_their_log_probabilities(local: tuple[str, Server], path: str) -> None:
    is_chat = "chat" in path
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    if not is_chat:
        more |= {"prompt": "hi", "messages": None}
    whole = ask(local[0], path, **more).json()["choices"][0]["logprobs"]
    choices = [c for e in events(ask(local[0], path, **more, stream=True)) for c in e["choices"]]
    assert all(
        c["logprobs"] for c in choices if (c["delta"].get("content") if is_chat else c["text"])
    )
    parts = [c["logprobs"] for c in choices if c["logprobs"]]
    names = ("content",) if is_chat else ("tokens", "token_logprobs", "text_offset")
    for name in names:
        assert [x for part in parts for x in part[name]] == whole[name]


def test_no_path_reaches_a_client(tmp_path: Path) -> None:
    refusal = "{{ raise_exception('no') }}"
    model = write_author(tmp_path / "secret" / "m", [TEXT], template=refusal)
    with serving(model, POLICY) as (address, _):
        answer = ask(address)
        assert answer.status_code == 400
        assert "no" in answer.json()["error"]["message"]
        assert "secret" not in answer.text
