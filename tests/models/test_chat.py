"""Chat templates, and what a folder wants of sampling."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.models import template_limits
from flexgen_jax.models.chat import ChatOptions, ChatTemplate
from flexgen_jax.models.defaults import SamplingDefaults, read_defaults
from flexgen_jax.models.folder import CheckpointError
from tests.helpers.command_line import run
from tests.helpers.models import write_checkpoint

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi  "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "What is 1 + 1?"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "{%- if m['role'] == 'system' %}{% continue %}{% endif %}\n"
    "    [{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def folder_with(folder: Path, template: Any, **others: Any) -> Path:
    write_checkpoint(folder)
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | others))
    return folder


def test_conversations_are_rendered_as_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    folder = folder_with(tmp_path / "m", TEMPLATE, tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(folder).render(MESSAGES) == expected


def test_a_template_of_its_own_file_or_by_name_comes_first(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    folder = folder_with(tmp_path / "m", named)
    assert ChatTemplate(folder).render(MESSAGES) == "A"
    assert ChatTemplate(folder).render(MESSAGES, ChatOptions(tools=[{}])) == "B"
    assert ChatTemplate(folder).render(MESSAGES, ChatOptions(template="tool_use")) == "B"
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    assert ChatTemplate(folder).render(MESSAGES) == "4"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("C")
    assert ChatTemplate(folder).render(MESSAGES, ChatOptions(tools=[{}])) == "C"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no system message') }}",
        "{{",
        "{{ 'a' * 10**10 }}",
        "{{ [1] * 10**9 }}",
        "{% set n = namespace(s='ab') %}"
        "{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}"
        "{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(s='abcd') %}"
        "{% for i in range(60) %}{% set n.s = f(n.s) %}{% endfor %}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ '%10000000000d' % 3 }}",
        "{{ '%*d' % (10**10, 3) }}",
        "{{ '{:10000000000}'.format(3) }}",
        "{{ '{0:{1}}'.format('a', 10**10) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ range(100000) | join('a' * 1000000) }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ 3 ** (10**9) }}",
        "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% for i in range(100000) %}"
        "{{ range(100000) | map('string') | list | length }}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.5)
    folder = folder_with(tmp_path / "m", template)
    with pytest.raises(CheckpointError, match="cannot apply the chat template"):
        ChatTemplate(folder).render(MESSAGES)


PART = {"type": "text", "text": "hello"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "42", "name": None},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "<b>'\u00e9'"}}
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p['text'] }}]{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "more"),
    [
        (PARTS, [{"role": "user", "content": [PART, PART]}], {}),
        (PLAIN, CALLS, {}),
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}", CALLS, {}),
        (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}"
            "{% endfor %}{% endfor %}",
            CALLS,
            {},
        ),
        ("{{ tools | tojson(indent=2) }}{{ documents }}", MESSAGES, {"tools": [TOOL]}),
        ("{{ enable_thinking }}{{ bos_token }}", MESSAGES, {"enable_thinking": False}),
        ("{{ bos_token }}", MESSAGES, {"bos_token": "!"}),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            MESSAGES,
            {},
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}{{ ns.n }}{{ dict(a=1) }}",
            MESSAGES,
            {},
        ),
        (
            "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
            [{"role": "assistant", "content": "x", "reasoning": "why"}],
            {},
        ),
        (PLAIN, [*MESSAGES[:-1], {"role": "assistant", "content": "So "}], {"continues": True}),
        (PLAIN, MESSAGES, {"add_generation_prompt": False}),
    ],
)
def test_a_template_gets_what_transformers_gives_it(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path / "m", template, tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    rest = dict(more)
    tools, continues = rest.pop("tools", None), rest.pop("continues", False)
    begins = rest.pop("add_generation_prompt", not continues)
    expected = theirs.apply_chat_template(
        messages,
        tools=tools,
        tokenize=False,
        add_generation_prompt=begins,
        continue_final_message=continues,
        **rest,
    )
    options = ChatOptions(
        tools=tools, variables=rest, adds_generation_prompt=begins, continues_final=continues
    )
    assert ChatTemplate(folder).render(messages, options) == expected


def test_messages_may_be_objects_of_openais_library(tmp_path: Path) -> None:
    types = pytest.importorskip("openai.types.chat")
    folder = folder_with(tmp_path / "m", PLAIN)
    message = types.ChatCompletionMessage(role="assistant", content=None)
    assert ChatTemplate(folder).render([message]) == "assistant:;"


def test_a_template_of_texts_gets_a_list_of_parts_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% for m in messages %}{{ m.role + ':' + m.content }};{% endfor %}"
    for number, source in enumerate((template, PLAIN)):
        folder = folder_with(tmp_path / str(number), source)
        with LLM(folder, dtype="float32") as llm:
            messages = [{"role": "user", "content": [PART, PART]}, {"role": "x", "content": "y"}]
            assert llm.chat_prompt(messages)[0] == "user:hello\nhello;x:y;"
            llm.chat_prompt(messages)
        assert capsys.readouterr().err.count("accepts text only") == 1
        with pytest.raises(CheckpointError, match="a part of type 'image'"):
            ChatTemplate(folder).render([{"role": "u", "content": [{"type": "image"}]}])


def test_a_call_has_one_time_and_may_be_told_which(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", "{{ strftime_now('%Y %H:%M:%S.%f') }}")
    with LLM(folder, dtype="float32") as llm:
        one, two = llm.chat([MESSAGES, MESSAGES], SamplingParams(1))
        told = llm.chat(MESSAGES, SamplingParams(1), now=datetime(2001, 2, 3, 4, 5, 6))
    assert one.prompt == two.prompt
    assert told[0].prompt == "2001 04:05:06.000000"


def test_chat_continues_the_rendered_text(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", TEMPLATE)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with LLM(folder, dtype="float32") as llm:
        one, two = llm.chat([MESSAGES, MESSAGES[1:2]], params)
        assert llm.chat(MESSAGES, params)[0].token_ids == one.token_ids
        assert llm.generate(one.prompt, params)[0].token_ids == one.token_ids
    assert two.prompt == "<s>    [user] Hi</s>\n[assistant]"
    out = tmp_path / "r.json"
    args = ("--max-tokens", "5", "--ignore-eos", "--json", out)
    done = run("generate", "--model", folder, "--dtype", "float32", "--chat", "Hi", *args)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["results"][0]["text"] == two.text


def test_without_a_template_there_is_no_chat(checkpoint: Callable[[], Path]) -> None:
    with LLM(checkpoint(), dtype="float32") as llm, pytest.raises(UserError, match="no chat templ"):
        llm.chat(MESSAGES)


def test_a_folder_says_how_to_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert read_defaults(folder).sampling.is_greedy
    wish = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": [7, 9]}
    (folder / "generation_config.json").write_text(json.dumps(wish))
    assert read_defaults(folder).sampling == SamplingDefaults(0.7, 50, 0.9)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(folder, dtype="float32", progress=True) as llm:
        assert llm.config.eos_ids == (7, 9)
        found = llm.generate(prompt_token_ids=[[5, 6, 8]] * 2, sampling_params=params)
        assert "temperature 0.7" in capsys.readouterr().err
        given = SamplingParams(12, 0.7, top_k=50, top_p=0.9, ignore_eos=True)
        same = llm.generate(prompt_token_ids=[[5, 6, 8]] * 2, sampling_params=given)
        greedy = SamplingParams(12, 0.0, ignore_eos=True)
        likeliest = llm.generate(prompt_token_ids=[[5, 6, 8]] * 2, sampling_params=greedy)
    assert [r.token_ids for r in found] == [r.token_ids for r in same]
    assert likeliest[0].token_ids == likeliest[1].token_ids != found[0].token_ids


@pytest.mark.parametrize(
    "wish", [{"do_sample": True, "temperature": -1}, {"do_sample": True, "top_p": 2}, [], "{"]
)
def test_a_wish_that_is_not_valid_is_an_error(tmp_path: Path, wish: Any) -> None:
    text = wish if isinstance(wish, str) else json.dumps(wish)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_defaults(tmp_path)
