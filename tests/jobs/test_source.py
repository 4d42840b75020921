"""The input of a job: streams, compressed files, lines that come later, lines that failed."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, UserError
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.options import JobOptions, Summary
from flexgen_jax.jobs.source import InputFacts, JobInput
from flexgen_jax.jobs.store import Disk
from tests.helpers.command_line import run as run_command

NUMBERS = count()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", policy=Policy(batch_size=4)) as made:
        yield made


def line(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "prompt": "It is", "max_tokens": 2, "temperature": 0} | more


def text_of(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def run(llm: LLM, source: Path, folder: Path, disk: Disk | None = None, **options: Any) -> Summary:
    return Job(llm, JobOptions(source, folder / "out.jsonl", **options), disk=disk).run()


def records(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(x) for x in (folder / "out.jsonl").read_text().splitlines()]
    assert len({record["line"] for record in found}) == len(found)
    return {record["id"]: record for record in found}


def zstd(content: bytes) -> bytes:
    packed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    return packed


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bytes])
def test_a_compressed_file_is_known_by_its_first_bytes(
    llm: LLM, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    source = tmp_path / "in.jsonl"  # whatever its name is
    source.write_bytes(pack(text_of(line("a"), line("b"))))
    assert run(llm, source, tmp_path).finished == 2
    assert records(tmp_path).keys() == {"a", "b"}
    if pack is not bytes:
        source.write_bytes(source.read_bytes()[:-5])
        with pytest.raises(UserError, match="cannot read the requests"):
            run(llm, source, tmp_path / "..", limit=1)


def piped(folder: Path, content: bytes) -> Path:
    """A named pipe from which the content can be read once."""
    path = folder / f"pipe{next(NUMBERS)}"
    os.mkfifo(path)
    threading.Thread(target=path.write_bytes, args=(content,), daemon=True).start()
    return path


def test_a_stream_is_read_once_and_may_be_given_again(llm: LLM, tmp_path: Path) -> None:
    whole = text_of(line("a"), line("b"), line("c"))
    for content in (whole, gzip.compress(whole)):
        folder = tmp_path / str(len(content))
        folder.mkdir()
        assert run(llm, piped(folder, content), folder, limit=2).finished == 2
        assert (folder / "out.jsonl.input").exists()
        assert run(llm, piped(folder, content), folder).finished == 3
        assert records(folder).keys() == {"a", "b", "c"}
        assert not (folder / "out.jsonl.input").exists()
        other = piped(folder, text_of(line("d"), line("b"), line("c")))
        with pytest.raises(UserError, match="different settings: the input"):
            run(llm, other, folder)


def test_standard_input_is_a_dash(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text_of(line("a")))))
    assert run(llm, Path("-"), tmp_path).finished == 1


@pytest.mark.parametrize("end", ["", "\n"])
def test_lines_may_be_added_and_none_changed(llm: LLM, tmp_path: Path, end: str) -> None:
    first = text_of(line("a"), line("b")).rstrip() + end.encode()
    source = tmp_path / "in.jsonl"
    source.write_bytes(first)
    assert run(llm, source, tmp_path).finished == 2
    before = records(tmp_path)
    more = b"" if end else b"\n"
    source.write_bytes(first + more + text_of(line("c")))
    summary = run(llm, source, tmp_path)
    assert (summary.finished, summary.total, summary.tokens) == (3, 3, 2)
    assert records(tmp_path).items() > before.items()
    assert run(llm, source, tmp_path).tokens == 0
    wrong = [text_of(line("x"), line("b"), line("c")), first, text_of(line("a"))]
    wrong += [text_of(line("c"), line("a"), line("b"), line("c"))]
    if not end:
        wrong.append(first + b" \n")
        first += b'{"id": "d"}'  # one line with the last one
        wrong.append(first)
    for content in wrong:
        source.write_bytes(content)
        with pytest.raises(UserError, match="lines may only be appended"):
            run(llm, source, tmp_path)
    assert len(records(tmp_path)) == 3


@pytest.mark.parametrize(
    ("old", "new", "is_longer"),
    [
        (b"a\nb\n", b"a\nb\nc\n", True),
        (b"a\nb", b"a\nb\nc", True),
        (b"a\nb", b"a\nbc", False),
        (b"a\nb", b"a\nb \n", True),
        (b"a\n\n", b"a\n\nb", True),
        (b"a\nb\n", b"a\nc\n", False),
        (b"a\nb\n", b"a\n", False),
        (b"", b"a", False),
    ],
)
def test_an_input_that_begins_with_another_is_known(
    tmp_path: Path, old: bytes, new: bytes, is_longer: bool
) -> None:
    facts = []
    for content in (old, new):
        (tmp_path / "in").write_bytes(content)
        source = JobInput(tmp_path / "in", tmp_path / "out")
        facts.append(InputFacts.of(source, facts[0].size if facts else None))
    assert (facts[1].earlier == facts[0].digest) == is_longer


class Cut(BaseException):
    """The power is gone."""


class CutDisk(Disk):
    def __init__(self, left: int) -> None:
        self._left = left

    def replace(self, old: Path, new: Path) -> None:
        self._left -= 1
        if self._left < 0:
            raise Cut
        super().replace(old, new)


def test_lines_that_failed_are_run_again_and_no_others(llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    bad, long = line("b", top_p=7), {"id": "c", "prompt_token_ids": [5] * 600}
    source.write_bytes(text_of(line("a"), bad, long, line("d")))
    summary = run(llm, source, tmp_path)
    assert (summary.finished, summary.errors) == (4, 2)
    assert summary.commonest is not None and summary.commonest[1] == 1
    before = records(tmp_path)
    for left in (0, 1, 9):
        with suppress(Cut):
            again = run(llm, source, tmp_path, CutDisk(left), retries_errors=True)
    assert (again.finished, again.errors, again.tokens) == (4, 2, 0)
    assert records(tmp_path) == before
    # What they failed by is gone: the model takes longer prompts, say.
    out = tmp_path / "out.jsonl"
    lines = out.read_text().splitlines()
    lines[0] = json.dumps({"id": "a", "line": 1, "error": {"code": "x", "message": "line 1: no"}})
    out.write_text("\n".join(lines) + "\n")
    again = run(llm, source, tmp_path, retries_errors=True)
    assert again.tokens == 2 and records(tmp_path) == before


def test_a_job_of_errors_alone_says_so(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    flags = ("-i", source, "-o", out, "--dtype", "float32", "--batch-size", "2")
    source.write_bytes(text_of(line("a", top_p=7), line("b", top_p=7), line("c", nonsense=1)))
    result = run_command("batch", *flags)
    assert result.exit_code == 1
    assert "2 of 3 errors: top_p must be above 0" in result.stderr
    source.write_bytes(source.read_bytes() + text_of(line("d")))
    assert run_command("batch", *flags).exit_code == 0
    assert records(tmp_path)["d"]["error"] is None
