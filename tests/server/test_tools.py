"""Tool calls by OpenAI's own client, with models that write calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("openai")

import openai

from flexgen_jax import Policy
from tests.helpers.serving import serving
from tests.helpers.writing import write_author

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "news")
]
WRITTEN = {
    "in tags": (
        [
            "Let me see.\n\n",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        ],
        [],
    ),
    "special": (
        ["[TOOL_CALLS]", "weather", "[ARGS]", '{"city": "Oslo"}'],
        ["[TOOL_CALLS]", "[ARGS]"],
    ),
}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 0,
    "max_tokens": 100,
}


@pytest.mark.parametrize("form", WRITTEN)
def test_calls_of_answers(tmp_path: Path, form: str) -> None:
    """Whole, in pieces, in batches; cut off, and without tools."""
    texts, special = WRITTEN[form]
    policy = Policy(batch_size=2, num_batches=1)
    model = write_author(tmp_path / "model", texts, special)
    with serving(model, policy, folder=tmp_path / "files") as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        choice = client.chat.completions.create(**ASKED, tools=TOOLS).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == ("Let me see." if form == "in tags" else None)
        (call,) = choice.message.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
        assert len(call.id) == 9

        with client.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert (streamed.message.content or None) == choice.message.content
        (other,) = streamed.message.tool_calls or []
        assert (other.function.name, other.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )

        cut = client.chat.completions.create(**{**ASKED, "max_tokens": 12}, tools=TOOLS)
        assert cut.choices[0].finish_reason == "length"
        plain = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice="none")
        assert plain.choices[0].message.tool_calls is None
        assert "Oslo" in (plain.choices[0].message.content or "")
        batch_line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
        line = {**batch_line, "body": {**ASKED, "tools": TOOLS}}
        file = client.files.create(file=("x", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while (batch := client.batches.retrieve(batch.id)).output_file_id is None:
            pass
        record = json.loads(client.files.content(batch.output_file_id).text)
        (last,) = record["response"]["body"]["choices"]
        assert last["finish_reason"] == "tool_calls"
        assert last["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "news"}),
        ({"type": "function", "function": {"name": "news"}}, {"news"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [TOOLS[1]]},
            },
            {"news"},
        ),
    ],
)
def test_a_call_is_demanded(tmp_path: Path, choice: Any, names: set[str]) -> None:
    """Of a model that would write something else; the arguments are of the schema."""
    pytest.importorskip("llguidance")
    model = write_author(tmp_path / "model", ["Hello there."])
    with serving(model, Policy(batch_size=2, num_batches=1)) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        biased = {**ASKED, "max_tokens": 300, "logit_bias": {}, "temperature": 1, "seed": 1}
        answer = client.chat.completions.create(**biased, tools=TOOLS, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.name in names
        if answer.choices[0].finish_reason == "tool_calls":
            assert list(json.loads(call.function.arguments)) == ["city"]
