"""Where flags come from, and what a command says beside its results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import click
import pytest

from flexgen_jax import UserError
from flexgen_jax.cli.commands import CONFIG, read_flag_defaults
from flexgen_jax.cli.generate import parse_variables
from flexgen_jax.cli.main import main
from flexgen_jax.engine.options import EngineOptions, LLMOptions
from tests.helpers.command_line import run
from tests.helpers.models import write_checkpoint

pytestmark = pytest.mark.usefixtures("loud")


@pytest.fixture
def loud() -> Iterator[None]:
    """The logger is as loud afterwards as before."""
    import logging

    level = logging.getLogger("flexgen_jax").level
    yield
    logging.getLogger("flexgen_jax").setLevel(level)


def test_a_file_has_defaults_for_all_commands_or_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "flexgen_jax.toml"
    monkeypatch.setenv(CONFIG, str(path))
    path.write_text(
        'dtype = "float32"\n[generate]\nmax-tokens = 3\n[eval.perplexity]\nwindow = 64\n'
    )
    found = read_flag_defaults(main)
    assert found["generate"]["max_tokens"] == 3 and found["bench"]["dtype"] == "float32"
    assert found["eval"]["perplexity"] == {"dtype": "float32", "window": 64}
    done = run("generate", "It is", "--json", tmp_path / "r.json", "--temperature", 0)
    report = json.loads((tmp_path / "r.json").read_text())["report"]
    assert done.exit_code == 0 and (report["num_tokens"], report["dtype"]) == (3, "float32")
    for wrong in ("nonsense = 1", "[generate]\nnonsense = 1", "[nonsense]\nx = 1", "= 3"):
        path.write_text(wrong)
        result = run("generate", "x")
        assert result.exit_code == 2
        assert "flexgen_jax.toml" in result.stderr and len(result.stderr.splitlines()) == 1
    monkeypatch.setenv(CONFIG, str(tmp_path / "none.toml"))
    with pytest.raises(UserError, match="does not exist"):
        read_flag_defaults(main)


def test_help_has_headings_and_one_name_for_new_tokens() -> None:
    for name, command in main.commands.items():
        if name in ("generate", "bench", "plan", "batch"):
            text = run(name, "--help").stdout
            assert text.index("Options:") < text.index("Model:") < text.index("Memory and machines")
            assert "--max-tokens" in text, name
            flags = [f for p in command.params if isinstance(p, click.Option) for f in p.opts]
            assert len(flags) == len(set(flags))


def test_a_command_is_as_loud_as_it_is_told(tmp_path: Path) -> None:
    flags = ("generate", "It", "--dtype", "float32", "--max-tokens", 2, "--temperature", 0)
    assert "toy of 5 million" in run(*flags).stderr
    assert "runs with Policy(" in run("-v", *flags).stderr
    quiet = run("-q", *flags).stderr
    assert quiet == ""
    assert "cannot be combined" in run("-q", "-v", *flags).stderr


def test_an_answer_is_printed_without_the_template(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    template = "<<{{ strftime_now('%Y') }}{{ style }}{{ messages[0].content }}>>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    out = tmp_path / "out.jsonl"
    flags = ["generate", "--model", folder, "--dtype", "float32", "--chat", "hi", "--max-tokens", 4]
    result = run(*flags, "--chat-option", "style=true", "--json", tmp_path / "r.json")
    (answer,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert result.stdout == answer["text"] + "\n"
    assert answer["prompt"].endswith("Truehi>>")
    kept = [*flags, "--now", "2001-02-03", "--output", out]
    assert run(*kept).exit_code == 0
    again = run(*kept)
    assert again.exit_code == 0 and "1 of 1 requests written to" in again.stderr
    later = run(*flags, "--now", "2002-02-03", "--output", out)
    assert "the time of conversations" in later.stderr
    assert json.loads(out.read_text())["text"] == answer["text"]
    assert "--chat" in run(*flags[:5], "x", "--chat-option", "a=1").stderr


def test_template_variables_are_json_or_texts() -> None:
    found = parse_variables(["a=false", "b=x=y", 'c={"d": [1]}', "e="])
    assert found == {"a": False, "b": "x=y", "c": {"d": [1]}, "e": ""}
    with pytest.raises(UserError, match="enable_thinking=false"):
        parse_variables(["nonsense"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device-memory", "lots"), "Invalid value for '--device-memory': 'lots' is not a size"),
        (("--coordinator", "localhost:1"), "--stages"),
        (("--model", "mixtral"), "Did you mean mistralai/Mixtral"),
    ],
)
def test_wrong_use_names_the_flag(flags: tuple[str, ...], said: str) -> None:
    result = run("generate", "x", *flags)
    assert result.exit_code == 2 and said in result.stderr


def test_a_folder_that_cannot_be_made_is_no_full_disk(tmp_path: Path) -> None:
    where = ("--offload-dir", "/proc/no/such", "--percent", 0, 0, 0, 0, 0, 0)
    result = run("generate", "x", "--dtype", "float32", "--batch-size", 1, *where)
    assert result.exit_code == 2 and "/proc/no/such cannot be created" in result.stderr


def test_a_plan_counts_what_prompts_share(tmp_path: Path) -> None:
    shape = ("plan", "--model", "facebook/opt-1.3b", "--hardware", "t4-16gb")
    lengths = ("--gen-len", 8, "--num-sequences", 64, "--json", tmp_path / "plan.json")
    seconds = []
    for flags in (
        ("--prompt-len", 530),
        ("--prompt-len", 30, "--prefix-len", 500, "--num-prefixes", 8),
    ):
        result = run(*shape, *lengths, *flags)
        seconds.append(json.loads((tmp_path / "plan.json").read_text())["predicted"]["total_s"])
    assert "64 x (30 + 8) tokens after 8 x 500 shared ones" in result.stdout
    assert seconds[1] < 0.6 * seconds[0]
    result = run(*shape, "--prefix-len", 500)
    assert result.exit_code == 2 and "--prefix-len needs --num-sequences" in result.stderr


def test_a_plan_that_fits_nowhere_names_the_budget_that_is_missing() -> None:
    shape = ("plan", "--model", "facebook/opt-1.3b", "--hardware", "t4-16gb")
    result = run(*shape, "--device-memory", "10MB")
    assert result.exit_code == 2
    assert "allow more device memory (--device-memory)" in result.stderr
    assert "disk" not in result.stderr


def test_keywords_of_llm_are_the_fields_of_the_options() -> None:
    keywords, options = get_type_hints(LLMOptions), get_type_hints(EngineOptions)
    assert keywords == {name: kind for name, kind in options.items() if name != "model"}
