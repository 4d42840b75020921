"""The documentation's links lead somewhere, its commands parse and run, and so does its Python."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from flexgen_jax.cli.main import main
from flexgen_jax.models.loading import shipped_model
from tests.helpers.adapters import write_adapter

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log"),
]
NOT_RUN = {
    "bench",
    "plan",
    "profile",
    "convert",
    "serve",
    "chat",
    "stage",
    "--ray",
    "HuggingFaceTB",
}
"""Words of commands that are only parsed: they take minutes, wait for input, or need a network."""


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL):
            yield page, text


def commands() -> Iterator[list[str]]:
    """The words of each flexgen-jax command."""
    for _, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"\||&&", line):
                words = shlex.split(part, comments=True)
                if words and Path(words[0]).name == "flexgen-jax":
                    yield words[1:]


COMMANDS = list(commands())
EXAMPLES = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for number, (page, text) in enumerate(blocks("python"))
    if page.stem != "adding_a_model" and "from openai" not in text
]


def test_there_are_commands_and_examples() -> None:
    names = {words[0] for words in COMMANDS}
    assert names >= {"generate", "batch", "serve", "plan", "eval", "profile", "bench", "convert"}
    assert len(EXAMPLES) >= 6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the files that commands name and a model with a chat template."""
    shutil.copytree(shipped_model(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    rows = [json.dumps({"id": str(n), "prompt": "It is", "max_tokens": 2}) for n in range(3)]
    (tmp_path / "requests.jsonl").write_text("\n".join(rows))
    (tmp_path / "requests.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    (tmp_path / "text.txt").write_text("The people of the United States have\nIt is so\n" * 8)
    (tmp_path / "p.json").write_text("{}")
    for name in ("sql", "law"):
        pair = {"A": np.ones((4, 256), np.float32), "B": np.zeros((256, 4), np.float32)}
        module = "model.decoder.layers.0.self_attn.q_proj"
        write_adapter(tmp_path / "adapters" / name, {module: pair})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[:60])
@pytest.mark.usefixtures("folder")
def test_command_parses(words: list[str]) -> None:
    """Its flags exist and take such values."""
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
    [words for words in COMMANDS if not NOT_RUN & {*" ".join(words).replace("/", " ").split()}],
    ids=lambda words: " ".join(words)[:60],
)
def test_command_runs(words: list[str], folder: Path) -> None:
    """With the small model instead of a large one, and few tokens."""
    places = {"path/to/adapter": "adapters/sql"}
    changed = [
        str(folder / places.get(word, "model"))
        if word.startswith("path/to")
        else word.replace("/ssd", str(folder))
        for word in words
    ]
    changed += ["--max-tokens", "2"] if words[0] == "generate" else []
    piped = (folder / "requests.jsonl").read_bytes() if "-" in words else None
    result = CliRunner().invoke(main, changed, input=piped)
    assert result.exit_code == 0, result.output
    assert result.output or (folder / "results.jsonl").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("text", EXAMPLES)
@pytest.mark.usefixtures("folder")
def test_example_runs(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With smaller sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exec(text.replace("2048", "256").replace("range(48)", "range(6)"), {})  # noqa: S102
    assert "print(" not in text or capsys.readouterr().out


def test_excerpts_are_in_the_code() -> None:
    source = "\n".join(
        path.read_text() for path in (ROOT / "flexgen_jax" / "models" / "families").glob("*.py")
    )
    for page, text in blocks("python"):
        assert page.stem != "adding_a_model" or text.strip() in source, text


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert f": {page.relative_to(ROOT / 'docs')}\n" in listed, page
