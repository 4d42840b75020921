"""`/v1/messages` and `/v1/responses`, by the clients of Anthropic and OpenAI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import httpx
import openai

from flexgen_jax import Policy
from flexgen_jax.server import messages, responses
from flexgen_jax.server.conversations import NO_IMAGE, in_turns
from flexgen_jax.server.errors import RefusedError
from tests.helpers.serving import serving
from tests.helpers.writing import write_author

THOUGHT, TEXT = "I think so.\n", "Let me see."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "d", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments|tojson }}>"
    "{% endfor %}{% endfor %}[assistant]<think>"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model that thinks, speaks and calls a tool."""
    written = [THOUGHT, "</think>", TEXT, CALL]
    folder = tmp_path_factory.mktemp("author") / "m"
    model = write_author(folder, written, ["</think>"], TEMPLATE)
    with serving(model, Policy(batch_size=2, num_batches=1), api_key="key") as (address, _):
        yield address


@pytest.fixture(scope="module")
def claude(address: str) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=address, api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0)


MESSAGE: dict[str, Any] = {
    "model": "claude-any",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi"}],
}


def blocks_of(message: Any) -> list[tuple[str, Any]]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


def test_messages_whole_and_in_pieces(claude: Any) -> None:
    whole = claude.messages.create(**MESSAGE, tools=[TOOL])
    expected = [("thinking", THOUGHT), ("text", TEXT), ("tool_use", {"city": "Oslo"})]
    assert blocks_of(whole) == expected
    assert (whole.stop_reason, whole.model, whole.role) == ("tool_use", "claude-any", "assistant")
    with claude.messages.stream(**MESSAGE, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()
    assert blocks_of(streamed) == expected
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 10
    count = claude.messages.count_tokens(
        model="x", messages=MESSAGE["messages"], tools=[TOOL]
    ).input_tokens
    assert count == whole.usage.input_tokens


def test_messages_end_for_a_reason(claude: Any) -> None:
    short = claude.messages.create(**{**MESSAGE, "max_tokens": 3})
    assert short.stop_reason == "max_tokens"
    stopped = claude.messages.create(**MESSAGE, stop_sequences=["see"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "see")
    assert blocks_of(stopped)[-1] == ("text", "Let me ")


def test_histories_of_messages() -> None:
    chat = messages.chat_body(
        {
            "model": "x",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be.", "cache_control": {}}],
            "metadata": {"user_id": "u"},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "O"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "and?"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "12 C"}],
                        },
                    ],
                },
            ],
            "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "unknown_field": 1,
        }
    )
    roles = [message["role"] for message in chat["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    assert chat["messages"][2]["reasoning_content"] == "Hm."
    assert chat["messages"][2]["tool_calls"][0]["function"]["arguments"] == {"city": "O"}
    assert chat["messages"][3] == {"role": "tool", "tool_call_id": "t1", "content": "12 C"}
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather"]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)
    assert chat["unknown_field"] == 1 and "metadata" not in chat


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"role": "x", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": "a"}], "system": [{"type": "x"}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": 3},
    ],
)
def test_impossible_messages_are_refused(address: str, body: dict[str, Any]) -> None:
    answer = httpx.post(
        f"{address}/v1/messages", json={"max_tokens": 3, **body}, headers={"x-api-key": "key"}
    )
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(f"{address}/v1/messages", json=body).status_code == 401


def items_of(response: Any) -> list[tuple[str, str]]:
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


def test_responses_whole_and_in_pieces(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 100}
    whole = client.responses.create(**asked, tools=[FUNCTION], store=False)
    expected = [("reasoning", THOUGHT), ("message", TEXT), ("function_call", '{"city": "Oslo"}')]
    assert items_of(whole) == expected
    assert (whole.status, whole.output_text) == ("completed", TEXT)
    assert whole.usage is not None and whole.usage.output_tokens > 10
    with client.responses.stream(**asked, tools=[FUNCTION]) as stream:
        names = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert items_of(streamed) == expected
    assert names[0] == "response.created" and names[-1] == "response.completed"
    assert names.count("response.output_item.done") == 3
    short = client.responses.create(**{**asked, "max_output_tokens": 16})
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def test_histories_of_responses() -> None:
    """As Codex sends them: everything, each turn."""
    chat = responses.chat_body(
        {
            "model": "m",
            "instructions": "You are Codex.",
            "input": [
                {"type": "message", "role": "developer", "content": "Be kind."},
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "done"},
                {"type": "message", "role": "developer", "content": "Now this."},
            ],
            "tools": [FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "patch"}],
            "tool_choice": "auto",
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "stream": True,
        }
    )
    roles = [message["role"] for message in chat["messages"]]
    assert roles == ["system", "developer", "user", "assistant", "tool", "developer"]
    assert [call["id"] for call in chat["messages"][3]["tool_calls"]] == ["c1", "c2"]
    assert chat["tools"] == [
        {"type": "function", "function": {k: v for k, v in FUNCTION.items() if k != "type"}}
    ]
    assert chat["response_format"]["json_schema"]["schema"] == SCHEMA
    assert chat["reasoning_effort"] == "low"
    assert not {"store", "include", "prompt_cache_key"} & {*chat}
    with pytest.raises(RefusedError, match="previous_response_id"):
        responses.chat_body({"input": "a", "previous_response_id": "r"})


def test_an_error_after_the_beginning_is_an_event() -> None:
    for writer in (
        messages.MessageWriter("a", "m", 3),
        responses.ResponseWriter("a", "m", 3),
    ):
        ((name, body),) = writer.fail("broken")
        assert name in ("error", "response.failed")
        assert "broken" in json.dumps(body)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}"
    "{{ raise_exception('system message must be at the beginning') }}{% endif %}"
    "{% set turn = loop.index0 - (messages[0].role == 'system')|int %}"
    "{% if m.role != 'system' and (m.role == 'user') != (turn % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
"""As of Gemma, Mistral and others."""


def test_agents_can_use_strict_templates(tmp_path: Path) -> None:
    """Claude Code sends instructions after the first message, Codex several messages in a row."""
    model = write_author(tmp_path / "model", ["Hello."], template=STRICT)
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    codex = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": role}]}
        for role in ("developer", "developer", "user", "user")
    ]
    with serving(model, Policy(batch_size=1)) as (address, _):
        for path, body in (
            ("messages", {**MESSAGE, "system": "s", "messages": late}),
            ("responses", {"input": codex, "instructions": "i"}),
        ):
            answer = httpx.post(f"{address}/v1/{path}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("s u", "s u"),
        ("u s", "u"),
        ("s d u u a u", "s u a u"),
        ("d d u a t t u u", "d u a t t u"),
        ("u a s u", "u a u"),
        ("a a", "a a"),
    ],
)
def test_turns(roles: str, expected: str) -> None:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": f"{n}"} for n, role in enumerate(roles.split())]
    turns = in_turns(messages)
    assert [turn["role"] for turn in turns] == [names[role] for role in expected.split()]
    texts = [text for turn in turns for text in turn["content"].split("\n\n")]
    assert texts == [message["content"] for message in messages]


def test_a_conversation_that_is_too_long_is_known_as_such(address: str) -> None:
    """Claude Code knows the message, Codex and OpenAI's clients the code."""
    long = [{"role": "user", "content": "x " * 20_000}]
    of_claude = httpx.post(
        f"{address}/v1/messages",
        json={**MESSAGE, "messages": long},
        headers={"x-api-key": "key"},
        timeout=60,
    )
    assert of_claude.status_code == 400
    said = of_claude.json()["error"]["message"]
    assert re.fullmatch(r"prompt is too long: \d+ tokens > \d+ maximum", said)
    of_codex = httpx.post(
        f"{address}/v1/responses",
        json={"input": long},
        headers={"Authorization": "Bearer key"},
        timeout=60,
    )
    assert of_codex.status_code == 400
    assert of_codex.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is" in of_codex.json()["error"]["message"]


def test_images_in_results_of_tools_leave_the_session_alive() -> None:
    """A history keeps them; images of users are an error."""
    image = {"type": "image", "source": {"type": "base64", "data": ""}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [image]}
    chat = messages.chat_body({"messages": [{"role": "user", "content": [result]}]})
    assert chat["messages"][0]["content"] == NO_IMAGE
    output = [{"type": "input_image", "image_url": "data:"}, {"type": "input_text", "text": "x"}]
    item = {"type": "function_call_output", "call_id": "call_1", "output": output}
    chat = responses.chat_body({"input": [item]})
    assert chat["messages"][0]["content"] == f"{NO_IMAGE}\nx"
    with pytest.raises(RefusedError, match="'image' is not supported"):
        messages.chat_body({"messages": [{"role": "user", "content": [image]}]})


def test_effort_and_schema_of_messages() -> None:
    wish = {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}
    chat = messages.chat_body({**MESSAGE, "output_config": wish})
    assert chat["reasoning_effort"] == "high"
    assert chat["response_format"]["json_schema"] == {"schema": SCHEMA}
