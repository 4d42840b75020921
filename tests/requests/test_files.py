"""Tests prompts from files, and runs that are interrupted and continue."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, SamplingParams, UserError
from flexgen_jax.errors import PromptError
from flexgen_jax.jobs import store
from flexgen_jax.jobs.store import Results
from flexgen_jax.requests.files import read_prompts
from tests.helpers.command_line import run
from tests.helpers.models import prompts

PROMPTS = ["one", "two three", "a bc d", "four", "e f"]
SHAPE = ["--batch-size", 2, "--num-batches", 1, "--max-tokens", 6, "--temperature", 1, "--seed", 3]


@pytest.fixture
def command(checkpoint: Callable[[str], Path], tmp_path: Path) -> list[object]:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    flags = ["--prompts-file", file, "--output", tmp_path / "out.jsonl", "--dtype", "float32"]
    return ["generate", "--model", checkpoint("base"), *flags, *SHAPE]


@pytest.fixture
def undisturbed(command: list[object], tmp_path: Path) -> bytes:
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return (tmp_path / "out.jsonl").read_bytes()


def test_records_are_in_the_order_of_prompts(command: list[object], tmp_path: Path) -> None:
    out, other = tmp_path / "out.jsonl", tmp_path / "r.json"
    greedy = [*command, "--temperature", 0, "--json", other]
    assert run(*greedy).exit_code == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["id"], record["line"]) for record in records] == [
        (str(n), n) for n in range(1, len(PROMPTS) + 1)
    ]
    assert json.loads(other.read_text())["summary"]["finished"] == len(PROMPTS)
    flags = [flag for flag in greedy if flag not in ("--output", out)]
    assert run(*flags).exit_code == 0
    shown = json.loads(other.read_text())["results"]
    for record, result in zip(records, shown, strict=True):
        assert all(record[key] == result[key] for key in ("text", "token_ids", "finish_reason"))
    assert "--output and --json" in run(*command, "--json", out).stderr


def test_a_run_goes_on_wherever_it_was_broken_off(
    command: list[object], undisturbed: bytes, tmp_path: Path
) -> None:
    """After `kill -9` or a full disk, the file may end anywhere, also within a line."""
    out = tmp_path / "out.jsonl"
    ends = [i + 1 for i, byte in enumerate(undisturbed) if byte == ord("\n")]
    for cut in (0, 1, ends[0] - 1, ends[0], ends[1] + 7, ends[2] + 60, ends[-1] - 1, ends[-1]):
        out.write_bytes(undisturbed[:cut])
        assert run(*command).exit_code == 0
        assert out.read_bytes() == undisturbed


def test_what_is_finished_is_in_the_file_when_a_run_ends_early(
    command: list[object], undisturbed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, add, count = tmp_path / "out.jsonl", Results.add, 0
    out.write_bytes(b"")

    def interrupted(self: Results, record: Mapping[str, Any]) -> None:
        nonlocal count
        if count == 2:
            raise KeyboardInterrupt
        count += 1
        add(self, record)

    monkeypatch.setattr(Results, "add", interrupted)
    result = run(*command)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    kept = out.read_bytes().splitlines()
    assert len(kept) == 2
    assert set(kept) <= set(undisturbed.splitlines())
    monkeypatch.setattr(Results, "add", add)
    assert run(*command).exit_code == 0
    assert out.read_bytes() == undisturbed


def test_an_output_of_something_else_is_refused_and_left_alone(
    command: list[object], undisturbed: bytes, tmp_path: Path
) -> None:
    out, prompts_file = tmp_path / "out.jsonl", tmp_path / "prompts.txt"
    for flags, differs in (
        (["--max-tokens", 7], "the input (its requests)"),
        (["--weight-bits", 4], "the model"),
        (["--seed", 4], "the seed"),
        (["--dtype", "bfloat16"], "the model"),
    ):
        result = run(*command, *flags)
        assert result.exit_code == 2
        assert differs in result.stderr and result.stderr.count("\n") == 1
    prompts_file.write_text("\n".join(["other", *PROMPTS[1:]]))
    assert "different settings: the input" in run(*command).stderr
    assert out.read_bytes() == undisturbed
    prompts_file.write_text("\n".join([*PROMPTS, "one more"]))
    assert run(*command).exit_code == 0
    assert out.read_bytes().startswith(undisturbed)
    assert out.read_bytes().count(b"\n") == len(PROMPTS) + 1
    kept, other = out.read_bytes(), tmp_path / "notes.txt"
    for path, content in (
        (other, b"my notes\nwithout an end"),
        (other, b"my notes"),
        (out, kept + b"{}\n"),
        (out, kept + b'{"run": 1}\n'),
        (out, b"\xff\n"),
    ):
        path.write_bytes(content)
        result = run(*command, "--output", path)
        assert result.exit_code == 2
        assert "choose another file" in result.stderr and result.stderr.count("\n") == 1
        assert path.read_bytes() == content


def test_a_copy_of_the_model_goes_on_and_another_tokenizer_does_not(
    command: list[object], undisturbed: bytes, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("base"), copy, copy_function=shutil.copyfile)
    os.utime(copy / "model.safetensors", (1, 1))
    result = run(*command, "--model", copy)
    assert result.exit_code == 0, result.output
    (copy / "tokenizer_config.json").write_text('{"extra_special_tokens": ["e"]}')
    assert "different settings: the model" in run(*command, "--model", copy).stderr


def test_a_file_system_without_locks(
    command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(store.fcntl, "flock", fail)
    assert run(*command).exit_code == 0
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == len(PROMPTS)


def test_two_runs_do_not_write_to_one_file(
    command: list[object], undisturbed: bytes, tmp_path: Path
) -> None:
    with open(tmp_path / "out.jsonl") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another job" in run(*command).stderr
    assert run(*command).exit_code == 0


def test_prompts_that_cannot_be_continued_have_an_error_in_the_file(
    command: list[object], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("short\n" + "a b " * 2000 + "\n")
    result = run(*command)
    assert result.exit_code == 0
    assert "(1 error)" in result.stderr
    good, bad = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert good["error"] is None and "the prompt has" in bad["error"]["message"]
    (tmp_path / "prompts.txt").write_text("a b " * 2000 + "\n")
    assert run(*command, "--output", tmp_path / "other.jsonl").exit_code == 1


def test_an_output_that_cannot_be_written_is_one_line(
    command: list[object], tmp_path: Path
) -> None:
    for path in ("/dev/full", tmp_path / "no" / "where.jsonl"):
        result = run(*command, "--output", path)
        assert result.exit_code == 2
        assert str(path) in result.stderr and result.stderr.count("\n") == 1


def test_results_come_as_they_are_finished(checkpoint: Callable[[str], Path]) -> None:
    choices = [SamplingParams(max_tokens=1 + i, ignore_eos=True) for i in range(len(prompts()))]
    with LLM(checkpoint("base"), dtype="float32", policy=Policy(batch_size=8)) as llm:
        seen: list[tuple[int, Any]] = []
        expected = llm.generate(
            prompt_token_ids=prompts(),
            sampling_params=choices,
            on_output=lambda index, result: seen.append((index, result)),
        )
        assert sorted(index for index, _ in seen) == list(range(len(expected)))
        assert all(result == expected[index] for index, result in seen)


def test_prompts_are_lines_and_nothing_else_splits_them(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    inside = "a\x0cb\u2028c\x85d\x1ee\rf"
    file.write_bytes(f"\ufeff{inside}\r\n \n\nlast ".encode())
    found = read_prompts(file)
    assert [prompt.text for prompt in found] == [inside, "last "]
    assert [prompt.where for prompt in found] == [f"{file}, line 1", f"{file}, line 4"]


def test_prompts_of_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "two\\nlines", "id": 7}\n\n{"prompt": "x"}\n')
    assert [prompt.text for prompt in read_prompts(file)] == ["two\nlines", "x"]
    for bad in (
        '{"text": "x"}',
        '"x"',
        '{"prompt": 1}',
        "{",
        "[" * 100_000,
        r'{"prompt": "\ud83d"}',
    ):
        file.write_text(f'{{"prompt": "x"}}\n{bad}\n')
        with pytest.raises(UserError, match=r"p\.jsonl, line 2 is not an object"):
            read_prompts(file)


def test_prompts_from_a_pipe(checkpoint: Callable[[str], Path]) -> None:
    flags = ["--model", checkpoint("base"), "--max-tokens", 1, "--prompts-file", "-"]
    result = run("generate", *flags, input="one\ntwo\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("---\n") == 2
    assert "standard input has no prompts" in run("generate", *flags, input="").stderr


def test_prompts_that_do_not_fit_are_named_together(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    file, model = tmp_path / "p.txt", checkpoint("base")
    file.write_text("short\n\n" + "a b " * 2000 + "\n" + "c " * 3000 + "\n")
    result = run("generate", "--model", model, "--prompts-file", file)
    assert result.exit_code == 2
    assert f"({file}, line 3; {file}, line 4)" in result.stderr
    assert "1 more prompts do not fit" in result.stderr
    with LLM(model) as llm, pytest.raises(PromptError, match="prompt 1 has 0 tokens") as caught:
        llm.score(prompt_token_ids=[[5], [], [6]])
    assert caught.value.indices == (1,)


def test_texts_that_are_cut_short_are_told(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(checkpoint("base"), dtype="float32") as llm:
        most = llm.config.max_positions
        llm.generate(prompt_token_ids=[[5] * (most - 2), [6]], sampling_params=SamplingParams(3))
    assert "1 of 2 prompts leave room for fewer" in capsys.readouterr().err
