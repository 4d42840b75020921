"""Chat templates, and what a folder wants of sampling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.models.chat import ChatTemplate
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
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    assert ChatTemplate(folder).render(MESSAGES) == "4"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no system message') }}",
        "{{",
    ],
)
def test_what_a_template_may_not_do_is_an_error(tmp_path: Path, template: str) -> None:
    folder = folder_with(tmp_path / "m", template)
    with pytest.raises(CheckpointError, match="chat template says"):
        ChatTemplate(folder).render(MESSAGES)


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
