"""The server, asked by OpenAI's own client and by hand."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("openai")

import httpx
import openai

from flexgen_jax import LLM, SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.models.loading import shipped_model
from flexgen_jax.server import incoming, kept
from flexgen_jax.server.app import Server
from flexgen_jax.server.engine import Engine
from flexgen_jax.server.incoming import BODY_BYTES
from tests.helpers.cases import examples
from tests.helpers.models import TEMPLATE
from tests.helpers.serving import POLICY, serving

MESSAGES: list[Any] = [{"role": "user", "content": "hi there"}]


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with serving(folder) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(served: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def library(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", policy=POLICY) as llm:
        yield llm


def test_conversations_are_answered_as_by_the_library(client: openai.OpenAI, library: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=0)
    (wanted,) = library.chat(MESSAGES, params)
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}
    asked["temperature"] = 0
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text
    assert whole.choices[0].finish_reason == wanted.finish_reason
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(wanted.token_ids)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == wanted.text
    assert chunks[-2].choices[0].finish_reason == wanted.finish_reason
    assert chunks[-1].usage == whole.usage


def test_prompts_are_completed_as_by_the_library(client: openai.OpenAI, library: LLM) -> None:
    """Several at once, several texts each, with log-probabilities and stop strings."""
    prompts = ["one two", "three"]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    wanted = library.generate(prompts, params)
    whole = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=8, temperature=0, logprobs=2, n=2
    )
    assert [choice.text for choice in whole.choices] == [
        result.text for result in wanted for _ in range(2)
    ]
    made = whole.choices[0].logprobs
    assert made is not None and made.token_logprobs is not None
    assert made.token_logprobs == pytest.approx([x.logprob for x in wanted[0].logprobs or []])
    stop = wanted[0].text[3:5]
    for streams in (False, True):
        answer: Any = client.completions.create(
            model="tiny", prompt="one two", max_tokens=8, temperature=0, stop=stop, stream=streams
        )
        parts = list(answer) if streams else [answer]
        text = "".join(part.choices[0].text for part in parts)
        assert text == wanted[0].text.split(stop)[0]


def test_a_seed_makes_a_text_the_same_again(client: openai.OpenAI) -> None:
    def sampled(**more: Any) -> str:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=20, temperature=1.5, **more
        )
        return answer.choices[0].message.content or ""

    assert sampled(seed=3) == sampled(seed=3) != sampled(seed=4)
    assert sampled() != sampled()


def test_texts_follow_a_schema(tmp_path: Path) -> None:
    """With a vocabulary that has all of JSON."""
    pytest.importorskip("llguidance")
    shutil.copytree(shipped_model(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    named: Any = {"name": "x", "schema": schema}
    with serving(tmp_path / "model") as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": named},
        )
    assert json.loads(answer.choices[0].message.content or "") in ({"a": 1}, {"a": 2})


def test_what_else_clients_ask_for(client: openai.OpenAI, served: str, library: LLM) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "flexgen-jax"
    tokens = httpx.post(f"{served}/tokenize", json={"prompt": "hi"}).json()
    assert tokens["tokens"] == library.encode("hi")
    said = httpx.post(f"{served}/tokenize", json={"messages": MESSAGES}).json()
    assert said["tokens"] == library.chat_prompt(MESSAGES)[1]
    text = httpx.post(f"{served}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert text == {"prompt": "hi"}
    assert httpx.get(f"{served}/health").json() == {"status": "ok"}
    asked: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
    client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert "flexgen_generation_tokens_total" in httpx.get(f"{served}/metrics").text
    assert httpx.get(f"{served}/status").json()["new_tokens"] >= 3
    page = httpx.get(served).text
    assert "<form" in page and not re.search(
        "(src|href)=|https?://|innerHTML", page.split("<style>")[1]
    )


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "x" * 5000}]}),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_errors_are_those_of_the_interface(
    client: openai.OpenAI, error: type[openai.APIStatusError], change: dict[str, Any], streams: bool
) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "stream": streams, **change}
    with pytest.raises(error) as raised:
        client.chat.completions.create(**asked)
    body: Any = raised.value.body
    types = {
        openai.NotFoundError: "not_found_error",
        openai.BadRequestError: "invalid_request_error",
    }
    assert body["message"] and body["type"] == types[error]


def test_a_key_is_needed_where_there_is_one(folder: Path) -> None:
    with serving(folder, api_key="secret") as (address, _):
        wrong, right = (
            openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
            for key in ("wrong", "secret")
        )
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        assert right.models.list().data
        assert httpx.get(f"{address}/metrics").status_code == 401
        for value, status in (("bearer secret", 200), ("BEARER  secret", 200), ("secret", 401)):
            answer = httpx.get(f"{address}/metrics", headers={"Authorization": value})
            assert answer.status_code == status, value
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_client_that_goes_away_frees_its_rows_and_too_many_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, goes_on = Engine._add, threading.Event()

    def held(self: Engine, name: str, token: int) -> None:
        add(self, name, token)
        goes_on.wait(30)

    monkeypatch.setattr(Engine, "_add", held)
    with serving(folder, most=2) as (address, server):
        asked = {"model": "tiny", "prompt": "hi", "max_tokens": 90, "ignore_eos": True}
        url = f"{address}/v1/completions"
        streamed = {**asked, "stream": True, "n": 2}
        with httpx.stream("POST", url, json=streamed, timeout=60) as answer:
            next(answer.iter_lines())
            refused = httpx.post(url, json=asked)
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
        goes_on.set()
        until_idle(server)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={**asked, "n": 2}, timeout=0.02)
        until_idle(server)
        assert httpx.post(url, json=asked, timeout=60).status_code == 200


def test_longer_and_sampled_texts_do_not_wait_for_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Engine._add

    def slowly(self: Engine, name: str, token: int) -> None:
        add(self, name, token)
        time.sleep(0.02)

    monkeypatch.setattr(Engine, "_add", slowly)
    with serving(folder, lengths=(48, 48)) as (address, server):
        url, asked = f"{address}/v1/completions", {"model": "tiny", "ignore_eos": True}
        greedy = {**asked, "prompt": "hi", "max_tokens": 40, "temperature": 0, "stream": True}
        sampled = {**asked, "prompt": "longer " * 5, "max_tokens": 48}
        with httpx.stream("POST", url, json=greedy) as first:
            kept = first.iter_lines()  # without it the connection is closed
            next(kept)
            with httpx.stream("POST", url, json={**sampled, "stream": True}) as second:
                next(second.iter_lines())
                assert server.engine.running == 2
        too_long = httpx.post(url, json={**sampled, "prompt": "hi " * 30, "max_tokens": 2})
        assert too_long.status_code == 200, "it is planned for anew"


def until_idle(server: Server) -> None:
    """Waits until no text is under way or waits."""
    deadline = time.monotonic() + 30
    while server.engine.running or server.engine.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_many_clients_at_once_get_right_answers(served: str, library: LLM) -> None:
    """Of random lengths, some of which leave before the end."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 40))) for _ in range(36)]
    counts = [rng.randint(1, 12) for _ in prompts]
    params = [SamplingParams(max_tokens=count, temperature=0) for count in counts]
    wanted = [result.text for result in library.generate(prompts, params)]

    def ask(number: int) -> str | None:
        body = {"model": "tiny", "prompt": prompts[number], "max_tokens": counts[number]}
        body["temperature"] = 0
        try:
            limit = 0.02 if number % 7 == 0 else 60
            answer = httpx.post(f"{served}/v1/completions", json=body, timeout=limit)
        except httpx.TimeoutException:
            return None
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(ask, range(len(prompts))))
    for number, (text, right) in enumerate(zip(made, wanted, strict=True)):
        assert text == right or (text is None and number % 7 == 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = ["model", "messages", "prompt", "max_tokens", "temperature", "n", "stop", "stream", "seed"]
FIELDS += ["logprobs", "response_format", "logit_bias", "tools", "stream_options", "tokens"]
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


ROUTES = [*PATHS, "/v1/models", "/v1/models/../../etc/passwd", "/x", "/status", "/v1/batches"]
ROUTES += ["/v1/files", "/v1/files/..%2f..%2fetc%2fpasswd/content", "/v1/batches/../x/cancel"]
REQUESTS = st.tuples(
    st.sampled_from(["POST", "POST", "POST", "GET", "DELETE", "PUT"]),
    st.sampled_from(ROUTES),
    st.binary(max_size=40)
    | JSON.map(lambda body: json.dumps(body).encode())
    | st.dictionaries(st.sampled_from(FIELDS), JSON).map(lambda body: json.dumps(body).encode()),
)


def check_refused(address: str, request: tuple[str, str, bytes]) -> None:
    method, path, body = request
    answer = httpx.request(method, f"{address}{path}", content=body)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]


@examples(40)
@given(request=REQUESTS)
def test_nonsense_is_refused_in_the_interface_form(
    served: str, request: tuple[str, str, bytes]
) -> None:
    check_refused(served, request)


@pytest.mark.slow
def test_much_nonsense_is_refused_and_touches_nothing(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with serving(folder, folder=kept) as (address, _):

        @settings(max_examples=3000, deadline=None)
        @given(REQUESTS)
        def refused(request: tuple[str, str, bytes]) -> None:
            check_refused(address, request)

        refused()
        assert httpx.get(f"{address}/health").status_code == 200
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert not [path for path in kept.rglob("*") if path.is_file()]


def test_a_body_that_is_too_large_is_refused(served: str) -> None:
    answer = httpx.post(f"{served}/v1/completions", content=b" " * (BODY_BYTES + 1))
    assert answer.status_code == 413


def test_what_comes_is_bounded_together_and_in_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that come at once, forms without a length, and bodies and headers that never end."""
    for name, value in (("BODIES_BYTES", 1 << 20), ("FILE_BYTES", 4 << 20)):
        monkeypatch.setattr(incoming, name, value)
        monkeypatch.setattr(kept, name, value, raising=False)
    monkeypatch.setattr(incoming, "PATIENCE_S", 1.0)
    monkeypatch.setattr(incoming, "HEADERS_S", 1.0)
    with serving(folder, folder=tmp_path) as (address, _):
        port = int(address.rpartition(":")[2])
        answer = httpx.post(f"{address}/v1/completions", content=b" " * (1 << 21))
        assert answer.status_code == 503 and "at once" in answer.text

        def form() -> Iterator[bytes]:
            name = b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
            yield name
            for _ in range(64):
                yield b"y" * (1 << 17)

        kind = {"Content-Type": "multipart/form-data; boundary=B"}
        with suppress(httpx.WriteError):  # the server may close while more is sent
            refused = httpx.post(f"{address}/v1/files", content=form(), headers=kind)
            assert refused.status_code == 413
        post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
        both = post + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        for sent, status in ((post, b""), (post + b"\r\n{", b" 408 "), (both, b" 400 ")):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(sent)
                received = b"".join(iter(lambda: connection.recv(4096), b""))
            assert status in received.splitlines()[0] if status else received == b""


def test_an_engine_that_fails_begins_anew(folder: Path) -> None:
    """Who asked is told; who asks later is answered, and the server ends as usual."""
    with serving(folder) as (address, server):
        stream, failures = server.llm.stream, iter([True, True])

        def failing(requests: Any, *more: Any) -> Any:
            if next(failures, False):
                next(requests)
                raise RuntimeError("broken")
            return stream(requests, *more)

        server.llm.stream = failing  # type: ignore[method-assign]
        url, asked = f"{address}/v1/completions", {"prompt": "hi", "max_tokens": 2}
        # The stream that runs already was begun before.
        assert httpx.post(url, json=asked, timeout=60).status_code == 200
        server.engine._asked.put(None)  # ends it
        answers = [httpx.post(url, json=asked, timeout=60) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [500, 500, 200]
        assert "broken" in answers[0].json()["error"]["message"]
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_request_that_no_plan_has_room_for_fails_alone(folder: Path) -> None:
    with serving(folder) as (address, server):
        stream = server.llm.stream

        def refusing(requests: Any, *more: Any) -> Any:
            taken = [next(requests)]
            if taken[0].sampling_params.max_tokens == 77:
                raise UserError("no plan fits")
            return stream(itertools.chain(taken, requests), *more)

        server.llm.stream = refusing  # type: ignore[method-assign]
        url = f"{address}/v1/completions"
        assert httpx.post(url, json={"prompt": "hi", "max_tokens": 2}).status_code == 200
        server.engine._asked.put(None)
        time.sleep(0.2)

        def ask(tokens: int) -> int:
            return httpx.post(
                url, json={"prompt": "hi", "max_tokens": tokens}, timeout=60
            ).status_code

        assert [ask(77), ask(3), ask(4)] == [400, 200, 200]
