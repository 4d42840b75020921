"""One line of a file of requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.jobs.lines import LineError, read_line
from tests.helpers.cases import examples

CHAT = "/v1/chat/completions"
NAMES = (
    "custom_id id method url body prompt messages max_tokens n stop temperature top_p logprobs "
    "top_logprobs logit_bias role content seed"
)
FIELDS = st.sampled_from(NAMES.split()) | st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=8,
)


def read(line: Any) -> Any:
    return read_line(json.dumps(line).encode(), 3, 99, 5)


def openai(url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


@examples(80)
@given(st.dictionaries(FIELDS, JSON, max_size=6).map(json.dumps).map(str.encode) | st.binary())
def test_any_line_is_read_or_refused(content: bytes) -> None:
    try:
        assert read_line(content, 3, 99, 5).number == 3
    except LineError as error:
        assert str(error)


@examples(80)
@given(st.sampled_from(["/v1/completions", CHAT]), st.dictionaries(FIELDS, JSON, max_size=6))
def test_any_body_is_read_or_refused(url: str, body: dict[str, Any]) -> None:
    try:
        content = json.dumps({**openai(url), "body": body}).encode()
        assert read_line(content, 3, 99, 5).name == "a"
    except LineError as error:
        assert error.name == "a" or "not JSON" in str(error)


def test_defaults_are_those_of_each_form() -> None:
    line = read(openai(prompt="x"))
    assert (line.params.max_tokens, line.params.temperature, line.params.seed) == (16, 1.0, 5)
    assert (line.params.top_k, line.params.top_p, line.has_seed) == (0, 1.0, False)
    line = read(openai(CHAT, messages=[{"role": "user", "content": "x"}]))
    assert (line.params.max_tokens, line.form) == (99, "chat")
    line = read({"id": "b", "prompt": "x"})
    assert (line.params.max_tokens, line.params.temperature) == (None, None)
    line = read({"id": "b", "messages": [{"role": "user", "content": "x"}]})
    assert line.params.max_tokens == 99


def test_what_is_given_is_taken() -> None:
    line = read(
        openai(prompt=["x", "y"], n=3, stop=["a", "b"], logit_bias={"7": -1}, logprobs=4, seed=8)
    )
    assert (line.choices, line.count, line.prompts) == (6, 3, ("x", "y"))
    assert line.params.stop == ("a", "b")
    assert line.params.biases == ((7, -1),)
    assert (line.params.logprobs, line.params.seed, line.has_seed) == (4, 8, True)
    line = read(openai(prompt=[[1, 2], [3]], max_tokens=None, user="me", stream=False))
    assert line.prompts == ((1, 2), (3,))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    line = read(openai(CHAT, messages=messages, logprobs=True, top_logprobs=2))
    assert line.messages == (messages[0],) and line.params.logprobs == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "must be a JSON object, not list"),
        ({"prompt": "x"}, '"id" must be a non-empty string'),
        ({"custom_id": 5, "body": {}}, '"custom_id" must be a non-empty string'),
        ({"id": "a"}, 'needs one of "prompt"'),
        ({"id": "a", "prompt": "x", "messages": []}, 'needs one of "prompt"'),
        ({"id": "a", "prompt": 5}, '"prompt" must be a text'),
        ({"id": "a", "prompt": "x", "tempature": 1}, 'unknown field "tempature"'),
        ({"id": "a", "prompt": "x", "n": 0}, '"n" must be'),
        ({"id": "a", "prompt": "x", "max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"id": "a", "prompt": "x", "ignore_eos": 1}, '"ignore_eos" must be true or false'),
        ({"id": "a", "prompt": "\ud800"}, "not UTF-8"),
        (openai("/v1/images"), '"url" must be one of'),
        (openai("/v1/embeddings"), '"input" must be a string'),
        (openai(prompt="x", stream=True), '"stream" is not supported'),
        (openai(prompt="x", response_format={"type": "xml"}), '"response_format" must be'),
        (openai(prompt="x", response_format={"type": "json_schema"}), '"response_format" must be'),
        ({"id": "a", "prompt": "x", "json_schema": "[" * 200_000}, "json_schema is not JSON"),
        (
            {"id": "a", "prompt": "x", "json_schema": {}, "stop": ","},
            "cannot be combined with min_tokens, ignore_eos",
        ),
        (
            openai(prompt="x", response_format={"type": "json_object"}, json_schema={}),
            "use only one of",
        ),
        ({"id": "a", "prompt": "x", "json_schema": 3}, "json_schema must be an object"),
        (
            {"id": "a", "prompt": "x", "json_schema": {}, "min_tokens": 3},
            "cannot be combined with min_tokens",
        ),
        (openai(prompt="x", temperature="hot"), "temperature must be"),
        (openai(prompt="x", logit_bias={"x": 1}), 'keys of "logit_bias" must be token ids'),
        (openai(prompt="x", logprobs=6), '"logprobs" must be'),
        (openai(prompt=["x"] * 100, n=2), "more than 128 completions"),
        (openai(CHAT, messages=[{"role": "user", "content": 3}]), '"content" must be a string'),
        (openai(CHAT, messages=[{"content": "x"}]), 'a string "role"'),
        (openai(CHAT, messages=[{"role": "user", "content": "x"}], top_logprobs=2), "needs"),
        ({**openai(prompt="x"), "method": "GET"}, '"method" must be "POST"'),
        ({**openai(prompt="x"), "extra": 1}, 'unknown field "extra"'),
    ],
)
def test_what_is_wrong_is_said(line: Any, said: str) -> None:
    with pytest.raises(LineError, match=said):
        read(line)
