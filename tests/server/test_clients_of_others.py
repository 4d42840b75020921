"""LangChain and LiteLLM against a running server, with models that write what is expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from flexgen_jax import Policy
from tests.helpers.serving import serving
from tests.helpers.writing import write_author

POLICY = Policy(batch_size=2, num_batches=1)
SCHEMA = {
    "title": "weather",
    "description": "The weather of a city.",
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_langchains_structured_output(tmp_path: Path, method: str) -> None:
    """The schema leaves the model little to choose; `json_mode` has none."""
    langchain = pytest.importorskip("langchain_openai")
    pytest.importorskip("llguidance")
    model = write_author(tmp_path / "model", ['{"city": "Oslo"}'])
    with serving(model, POLICY) as (address, _):
        chat = langchain.ChatOpenAI(
            model="tiny", base_url=f"{address}/v1", api_key="none", temperature=0, max_tokens=60
        )
        structured = chat.with_structured_output(SCHEMA, method=method)
        answer: Any = structured.invoke("The weather in Oslo as JSON?")
    assert set(answer) == {"city"}
    if method != "json_mode":
        assert answer["city"] in ("Oslo", "Rome")


def test_litellm(tmp_path: Path) -> None:
    """Whole and streamed answers, tool calls, and vectors."""
    litellm = pytest.importorskip("litellm")
    model = write_author(tmp_path / "model", [CALL])
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    with serving(model, POLICY) as (address, _):
        asked: dict[str, Any] = {
            "model": "openai/tiny",
            "api_base": f"{address}/v1",
            "api_key": "none",
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
            "max_tokens": 60,
        }
        plain = litellm.completion(**asked)
        called = litellm.completion(**asked, tools=tools)
        pieces = list(litellm.completion(**asked, tools=tools, stream=True))
        vectors = litellm.embedding(
            model="openai/tiny", api_base=f"{address}/v1", api_key="none", input=["a", "b"]
        )
    assert plain.choices[0].message.content == CALL
    (call,) = called.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    assert called.choices[0].finish_reason == "tool_calls"
    deltas = [x for p in pieces for x in p.choices[0].delta.tool_calls or ()]
    assert "".join(x.function.arguments or "" for x in deltas) == '{"city": "Oslo"}'
    assert len(vectors.data) == 2
