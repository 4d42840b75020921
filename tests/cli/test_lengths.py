"""`bench --lengths`: texts of different lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexgen_jax.cli.bench import text_lengths
from flexgen_jax.errors import UserError
from tests.helpers.command_line import run


def test_drawn_lengths_have_the_mean_and_the_limit() -> None:
    found = text_lengths("lognormal:64", 4000, 512, 0)
    assert found == text_lengths("lognormal:64", 4000, 512, 0)
    assert found != text_lengths("lognormal:64", 4000, 512, 1)
    assert min(found) >= 1 and max(found) <= 512
    assert abs(sum(found) / 4000 - 64) < 2
    assert sorted(found)[2000] < 55, "half of them are shorter than the mean"


def test_lengths_of_a_file_are_used_again_and_again(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("3\n5\n1000\n")
    assert text_lengths(str(file), 5, 100, 0) == [3, 5, 100, 3, 5]


@pytest.mark.parametrize("content", ["", "3\nx", "0\n"])
def test_bad_files(tmp_path: Path, content: str) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(content)
    with pytest.raises(UserError, match=r"lengths\.txt: each line must have a number of tokens"):
        text_lengths(str(file), 2, 9, 0)


@pytest.mark.parametrize("name", ["lognormal", "lognormal:0", "lognormal:x", "nowhere.txt"])
def test_neither_a_file_nor_a_distribution(name: str) -> None:
    with pytest.raises(UserError, match=f"--lengths {name}: .*lognormal:MEAN"):
        text_lengths(name, 2, 9, 0)


def test_texts_end_where_the_lengths_say(tmp_path: Path) -> None:
    lengths, report = tmp_path / "lengths.txt", tmp_path / "report.json"
    lengths.write_text("1 4 9 2 6")
    flags = ["--prompt-len", "8", "--gen-len", "12", "--num-sequences", "7", "--batch-size", "4"]
    result = run("bench", *flags, "--lengths", str(lengths), "--json", str(report))
    assert result.exit_code == 0, result.output
    assert json.loads(report.read_text())["num_tokens"] == 1 + 4 + 9 + 2 + 6 + 1 + 4
