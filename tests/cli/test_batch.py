"""`flexgen-jax batch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexgen_jax.cli.commands import Terminated
from flexgen_jax.cli.main import main
from flexgen_jax.jobs.job import Job


def command(folder: Path, *more: str) -> list[str]:
    (folder / "in.jsonl").write_text('{"id": "a", "prompt": "It is", "max_tokens": 3}\nno\n')
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return ["batch", *files, "--batch-size", "2", *more]


def test_a_file_of_requests(tmp_path: Path) -> None:
    more = ["--progress-file", str(tmp_path / "now.json"), "--json", str(tmp_path / "report.json")]
    more += ["--watch", "0"]
    result = CliRunner().invoke(main, command(tmp_path, *more))
    assert result.exit_code == 0, result.output
    assert "watch the job at http://127.0.0.1:" in result.stderr
    assert "2 of 2 requests written to" in result.stderr and "(1 error)" in result.stderr
    records = [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {record["line"]: record["error"] is None for record in records} == {1: True, 2: False}
    now = json.loads((tmp_path / "now.json").read_text())
    assert (now["requests"], now["finished"], now["errors"], now["tokens"]) == (2, 2, 1, 3)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"]["tokens"] == 3 == report["report"]["num_tokens"]


def test_what_ends_it_is_its_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, status in ((Terminated(), 143), (KeyboardInterrupt(), 130)):

        def ended(_job: Job, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(Job, "run", ended)
        result = CliRunner().invoke(main, command(tmp_path))
        assert result.exit_code == status
        assert "interrupted" in result.stderr


def test_missing_files_are_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["batch", "-i", "none.jsonl", "-o", "out.jsonl"])
    assert result.exit_code == 2 and "none.jsonl" in result.stderr
    wrong = str(tmp_path / "none" / "out.jsonl")
    result = CliRunner().invoke(main, [*command(tmp_path), "-o", wrong])
    assert result.exit_code == 2 and wrong in result.stderr
