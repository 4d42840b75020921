"""The README's commands: all are parsed, and those that need no network and no large model run."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flexgen_jax.cli.main import main
from flexgen_jax.models.loading import shipped_model

README = Path(__file__).parent.parent.parent / "README.md"

TOO_MUCH = {"bench", "plan", "profile", "convert", "lm-eval", "HuggingFaceTB"}
"""Words of commands that take minutes, or need a checkpoint, an extra or the hub: only parsed."""


def commands() -> Iterator[list[str]]:
    """The words of each command that begins with flexgen-jax, or is given to it."""
    for block in re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\||&&", line):
                words = shlex.split(part)
                if words and Path(words[0]).name == "flexgen-jax":
                    yield words[1:]


COMMANDS = list(commands())


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 15
    named = {words[0] for words in COMMANDS}
    assert named >= {"generate", "batch", "bench", "plan", "eval", "profile", "models", "convert"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files are that the commands name, and a model with a chat template."""
    shutil.copytree(shipped_model(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    rows = [json.dumps({"id": str(n), "prompt": "It is", "max_tokens": 2}) for n in range(3)]
    (tmp_path / "requests.jsonl").write_text("\n".join(rows))
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    for name in ("prompts.txt", "questions.txt", "examples.txt", "text.txt"):
        (tmp_path / name).write_text("The people of the United States have\nIt is so\n" * 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:60])
@pytest.mark.usefixtures("folder")
def test_command_is_parsed(words: list[str]) -> None:
    """Its flags are there, and take such values."""
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        child = command.get_command(context, words[0])
        assert child is not None, words[0]
        command, words = child, words[1:]
    command.make_context("x", [*words])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "words",
    [words for words in COMMANDS if not TOO_MUCH & {*" ".join(words).replace("/", " ").split()}],
    ids=lambda words: " ".join(words)[:60],
)
def test_command_runs(words: list[str], folder: Path) -> None:
    """With the small model in place of a large one, and for few tokens."""
    changed = [
        str(folder / "model") if word.startswith("path/to") else word.replace("/ssd", str(folder))
        for word in words
    ]
    changed += ["--max-tokens", "2"] if words[0] == "generate" else []
    piped = (folder / "requests.jsonl").read_bytes() if "-" in words else None
    result = CliRunner().invoke(main, changed, input=piped)
    assert result.exit_code == 0, result.output
    assert result.output or (folder / "results.jsonl").exists()
