"""Requests as OpenAI's API and vLLM take them: the same meaning, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flexgen_jax import LLM, Policy
from flexgen_jax.jobs.fields import IGNORED, NEUTRAL
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.lines import LineError, read_line
from flexgen_jax.jobs.options import JobOptions
from tests.helpers.models import write_checkpoint

MESSAGES = [{"role": "user", "content": "x"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

SENSIBLE: dict[str, Any] = {
    "messages": MESSAGES,
    "prompt": "x",
    "model": "m",
    "temperature": 0.5,
    "top_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1},
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "echo": True,
    "n": 2,
    "seed": 3,
    "stop": ["a"],
    "response_format": {"type": "json_object"},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
}
"""Values of fields that are done."""


def read(url: str, **body: Any) -> Any:
    given = {"messages": MESSAGES} if url == CHAT else {"prompt": "x"}
    line = {"custom_id": "a", "method": "POST", "url": url, "body": given | body}
    return read_line(json.dumps(line).encode(), 1, 9, 0)


def fields_of(url: str) -> set[str]:
    if url == CHAT:
        from openai.types.chat import completion_create_params as params
    else:
        from openai.types import completion_create_params as params
    return {*params.CompletionCreateParamsBase.__annotations__, "stream"}


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_every_field_of_openais_is_done_accepted_or_refused_by_name(url: str) -> None:
    pytest.importorskip("openai")
    text = Path("docs/batch.md").read_text()
    plain = read(url)
    for name in sorted(fields_of(url)):
        assert f"`{name}`" in text, f"docs/batch.md does not name {name}"
        assert read(url, **{} if name in ("messages", "prompt") else {name: None}) == plain
        if name in IGNORED:
            assert read(url, **{name: {"any": 1}}) == plain
        elif name in NEUTRAL:
            for value in NEUTRAL[name]:
                assert read(url, **{name: value}) == plain
            with pytest.raises(LineError, match=f'"{name}" is not supported'):
                read(url, **{name: "something else"})
        elif name in ("logprobs", "top_logprobs"):
            asked = {"logprobs": True, "top_logprobs": 3} if url == CHAT else {"logprobs": 3}
            assert read(url, **asked).params.logprobs == 3
        else:
            tools = {"tools": SENSIBLE["tools"]} if name == "tool_choice" else {}
            other = read(url, **tools, **{name: SENSIBLE[name]})
            assert other != read(url, **tools) or name in ("messages", "prompt")


@pytest.mark.parametrize("field", ["modalities", "top_logprobs", "top_k", "guided_json"])
def test_what_says_nothing_new_is_taken(field: str) -> None:
    value = {"modalities": ["text"], "top_logprobs": 0, "top_k": -1, "guided_json": None}[field]
    assert read(CHAT, **{field: value}) == read(CHAT)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, '"content" must be a string or a list'),
        (
            {"messages": [{"role": "u", "content": [{"type": "image_url", "image_url": {}}]}]},
            'type "image_url"',
        ),
        ({"chat_template_kwargs": [1]}, '"chat_template_kwargs" must be an object'),
        ({"tools": [1]}, '"tools" must be a list of objects'),
        ({"tool_choice": "required"}, 'needs "tools"'),
        ({"tool_choice": "any"}, '"tool_choice" must be'),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": ["f"]},
                }
            },
            '"tool_choice" must be',
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "names the tool 'g', which",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "use only one of"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
        ({"reasoning_effort": 3}, '"reasoning_effort" must be a string'),
    ],
)
def test_what_cannot_be_meant_is_named(body: dict[str, Any], said: str) -> None:
    with pytest.raises(LineError, match=said):
        read(CHAT, **body)


TEMPLATE = (
    "{{ strftime_now('%H:%M:%S.%f') }}{{ enable_thinking }}{{ reasoning_effort }}"
    "{% for m in messages %}{% for p in m.content %}{{ p.text or p }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_checkpoint(tmp_path_factory.mktemp("m") / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    with LLM(folder, dtype="float32", policy=Policy(batch_size=4)) as made:
        yield made


def job(llm: LLM, folder: Path, *bodies: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    lines = []
    for number, body in enumerate(bodies):
        url = CHAT if "messages" in body else COMPLETIONS
        line = {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        lines.append(json.dumps(line) + "\n")
    (folder / "in.jsonl").write_text("".join(lines))
    Job(llm, JobOptions(folder / "in.jsonl", folder / "out.jsonl", **options)).run()
    found = [json.loads(x) for x in (folder / "out.jsonl").read_text().splitlines()]
    return sorted(found, key=lambda record: int(record["line"]))


def test_all_conversations_of_a_job_have_one_time(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an interruption; and the template is told what the body says."""
    texts: list[str] = []
    real = llm.chat_prompt

    def watched(*given: Any) -> Any:
        texts.append(real(*given)[0])
        return real(*given)

    monkeypatch.setattr(llm, "chat_prompt", watched)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    bodies = [
        {"messages": parts, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": parts, "tools": SENSIBLE["tools"], "reasoning_effort": "low"},
        {"messages": parts, "max_tokens": 2},
    ]
    job(llm, tmp_path, *bodies, limit=1)
    job(llm, tmp_path, *bodies)
    moments = {text[:15] for text in texts}
    assert len(moments) == 1 and len(texts) == 3
    assert [text[15:] for text in texts] == ["Falsehi", "lowhif", "hi"]
    (tmp_path / "other").mkdir()
    job(llm, tmp_path / "other", *bodies, now=datetime(2001, 2, 3, 4, 5, 6))
    assert texts[-1].startswith("04:05:06.000000")


def test_no_token_of_log_probabilities_is_lost(tmp_path: Path) -> None:
    """Most of them are parts of characters here."""
    chat = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 4}
    with LLM(dtype="float32", policy=Policy(batch_size=4)) as toy:
        texts = [toy.piece(n).decode(errors="replace") for n in range(toy.config.vocab_size)]
        biases = {str(n): 90 for n, text in enumerate(texts) if "\ufffd" in text}
        asked = {"prompt": "It", "max_tokens": 12, "temperature": 0, "logit_bias": biases}
        by_id = {**asked, "return_tokens_as_token_ids": True}
        first, second = job(toy, tmp_path, {**asked, "logprobs": 5}, {**by_id, "logprobs": 5})
        pieces = {toy.piece(n): n for n in range(toy.config.vocab_size)}
    for record in (first, second):
        choice = record["response"]["body"]["choices"][0]
        logprobs = choice["logprobs"]
        assert all(len(top) in (5, 6) for top in logprobs["top_logprobs"])
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert token in top
        assert len(logprobs["text_offset"]) == len(logprobs["tokens"])
        assert max(logprobs["text_offset"]) <= len(choice["text"])
    names = first["response"]["body"]["choices"][0]["logprobs"]["tokens"]
    ids = second["response"]["body"]["choices"][0]["logprobs"]["tokens"]
    assert any(name.startswith("bytes:") for name in names)
    for name, number in zip(names, ids, strict=True):
        piece = name.encode()
        if name.startswith("bytes:"):
            piece = bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
        assert f"token_id:{pieces[piece]}" == number
    assert read(CHAT, **{k: v for k, v in chat.items() if k != "messages"}).params.logprobs == 4


def test_reasoning_is_apart_from_the_answer(tmp_path: Path) -> None:
    """Where the template's end opens it: its marks are tokens of one character here."""
    from flexgen_jax.models.marks import REASONING_MARKS

    folder = write_checkpoint(tmp_path / "m")
    template = {"chat_template": "{{ messages[0].content }}{{ begin }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    with LLM(folder, dtype="float32") as llm:
        params = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        plain = {"messages": [{"role": "user", "content": "abc("}], **params}
        (tmp_path / "a").mkdir()
        (whole,) = job(llm, tmp_path / "a", plain)
        text = whole["response"]["body"]["choices"][0]["message"]["content"]
        for mark, opens in ((text[6], "("), (text[6], text[0]), ("\x00", "(")):
            own = tmp_path / f"{ord(mark)}-{ord(opens)}"
            own.mkdir()
            with mock.patch.dict(REASONING_MARKS, {opens: mark}, clear=True):
                (record,) = job(llm, own, plain)
            message = record["response"]["body"]["choices"][0]["message"]
            rest = text if opens == "(" else text[1:]
            if mark not in rest:
                assert (message["content"], message["reasoning_content"]) == (None, rest)
                continue
            before, _, after = rest.partition(mark)
            assert (message["reasoning_content"], message["content"]) == (before, after)
