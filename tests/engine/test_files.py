"""Tests prompts from files, and runs that are interrupted and continue."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, SamplingParams, UserError
from flexgen_jax.engine import files
from flexgen_jax.errors import PromptError
from tests.helpers.command_line import run
from tests.helpers.models import prompts

pytestmark = pytest.mark.usefixtures("compiled_quickly")

PROMPTS = ["one", "two three", "a bc d", "four", "e f"]
SHAPE = ["--batch-size", 2, "--num-batches", 1, "--max-tokens", 6, "--temperature", 1, "--seed", 3]


@pytest.fixture
def command(checkpoint: Callable[[str], Path], tmp_path: Path) -> list[object]:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    flags = ["--prompts-file", file, "--output", tmp_path / "out.jsonl", "--dtype", "float32"]
    return ["generate", "--model", checkpoint("base"), *flags, *SHAPE]


def lines_of(path: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["index"] for line in found}) == len(found)
    return {line["index"]: line for line in found}


@pytest.fixture
def undisturbed(command: list[object], tmp_path: Path) -> bytes:
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    return (tmp_path / "out.jsonl").read_bytes()


def test_lines_are_as_in_json(command: list[object], undisturbed: bytes, tmp_path: Path) -> None:
    out, other = tmp_path / "out.jsonl", tmp_path / "r.json"
    found = lines_of(out)
    assert [found[i]["prompt"] for i in range(len(PROMPTS))] == PROMPTS
    assert run(*command, "--output", tmp_path / "new.jsonl", "--json", other).exit_code == 0
    written = json.loads(other.read_text())
    for index, result in enumerate(written["results"]):
        assert result == {key: found[index][key] for key in result}
        assert len(result["token_ids"]) <= 6
    assert run(*command, "--json", other).exit_code == 0  # with nothing left to do
    assert json.loads(other.read_text()) == {"results": written["results"], "report": {}}
    assert "--output and --json" in run(*command, "--json", out).stderr


def test_a_run_goes_on_wherever_it_was_broken_off(
    command: list[object], undisturbed: bytes, tmp_path: Path
) -> None:
    """After `kill -9` or a full disk, the file may end anywhere, also within a line."""
    out = tmp_path / "out.jsonl"
    expected = lines_of(out)
    ends = [i + 1 for i, byte in enumerate(undisturbed) if byte == ord("\n")]
    for cut in (0, 1, ends[0] - 1, ends[0], ends[1] + 7, ends[2] + 60, ends[-1] - 1, ends[-1]):
        out.write_bytes(undisturbed[:cut])
        result = run(*command, "--json", tmp_path / "r.json")
        assert result.exit_code == 0, result.output
        assert lines_of(out) == expected
        written = json.loads((tmp_path / "r.json").read_text())["results"]
        assert [result["prompt"] for result in written] == PROMPTS
        kept = max([0, *(end for end in ends if end <= cut)])
        assert out.read_bytes()[:kept] == undisturbed[:kept]


def test_what_is_finished_is_in_the_file_when_a_run_ends_early(
    command: list[object], undisturbed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write, count = tmp_path / "out.jsonl", files.OutputFile.write, 0
    expected = lines_of(out)
    out.unlink()

    def interrupted(self: files.OutputFile, index: int, result: Any) -> None:
        nonlocal count
        if count == 2:
            raise KeyboardInterrupt
        count += 1
        write(self, index, result)

    monkeypatch.setattr(files.OutputFile, "write", interrupted)
    result = run(*command)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    kept = lines_of(out)
    assert len(kept) == 2
    assert kept.items() <= expected.items()
    monkeypatch.setattr(files.OutputFile, "write", write)
    assert "2 of 5 texts are in" in run(*command).stderr
    assert lines_of(out) == expected


def test_an_output_of_something_else_is_refused_and_left_alone(
    command: list[object], undisturbed: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    notes = b"my notes\nwithout an end"
    for content in (
        notes,
        notes[:8],
        undisturbed + b"{}\n",
        undisturbed + b'{"run": 1}',
        b"\xff\n",
    ):
        out.write_bytes(content)
        result = run(*command)
        assert result.exit_code == 2
        assert "is not of this run" in result.stderr
        assert result.stderr.count("\n") == 1
        assert out.read_bytes() == content
    out.write_bytes(undisturbed)
    for flags in (
        ["--max-tokens", 7],
        ["--weight-bits", 4],
        ["--seed", 4],
        ["--dtype", "bfloat16"],
    ):
        assert "is not of this run" in run(*command, *flags).stderr
    (tmp_path / "prompts.txt").write_text("\n".join(["other", *PROMPTS[1:]]))
    assert "is not of this run" in run(*command).stderr
    assert out.read_bytes() == undisturbed


def test_a_copy_of_the_model_goes_on_and_another_tokenizer_does_not(
    command: list[object], undisturbed: bytes, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("base"), copy, copy_function=shutil.copyfile)
    os.utime(copy / "model.safetensors", (1, 1))
    result = run(*command, "--model", copy)
    assert result.exit_code == 0, result.output
    (copy / "tokenizer_config.json").write_text('{"extra_special_tokens": ["e"]}')
    assert "is not of this run" in run(*command, "--model", copy).stderr


def test_a_file_system_without_locks(
    command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(files.fcntl, "flock", fail)
    assert run(*command).exit_code == 0
    assert len(lines_of(tmp_path / "out.jsonl")) == len(PROMPTS)


def test_two_runs_do_not_write_to_one_file(
    command: list[object], undisturbed: bytes, tmp_path: Path
) -> None:
    with open(tmp_path / "out.jsonl") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another run" in run(*command).stderr
    assert run(*command).exit_code == 0


def test_a_full_disk_is_one_line(command: list[object], tmp_path: Path) -> None:
    result = run(*command, "--output", "/dev/full")
    assert result.exit_code == 2
    assert "--output /dev/full: No space left" in result.stderr
    result = run(*command, "--output", tmp_path / "no" / "where.jsonl")
    assert result.exit_code == 2
    assert "cannot write --output" in result.stderr


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
        some = llm.generate(prompt_token_ids=prompts(), sampling_params=choices, skip={0, 2})
        assert some == [result for i, result in enumerate(expected) if i not in (0, 2)]
        assert llm.generate(prompt_token_ids=prompts()[:1], skip=[0]) == []


def test_prompts_are_lines_and_nothing_else_splits_them(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    inside = "a\x0cb\u2028c\x85d\x1ee\rf"
    file.write_bytes(f"\ufeff{inside}\r\n \n\nlast ".encode())
    found = files.read_prompts(file)
    assert [prompt.text for prompt in found] == [inside, "last "]
    assert [prompt.where for prompt in found] == [f"{file}, line 1", f"{file}, line 4"]


def test_prompts_of_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "two\\nlines", "id": 7}\n\n{"prompt": "x"}\n')
    assert [prompt.text for prompt in files.read_prompts(file)] == ["two\nlines", "x"]
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
            files.read_prompts(file)


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
