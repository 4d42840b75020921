"""Tests batches, tokenizers and memory sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.errors import UserError
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import BlockShape
from flexgen_jax.requests.batching import ENTRY_WAVES, Waiting, grouped
from flexgen_jax.requests.feed import Listed
from flexgen_jax.requests.generation import Generation
from flexgen_jax.requests.padding import pad_prompts, padded_length
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.requests.sampling import SamplingParams
from flexgen_jax.units import parse_bytes
from tests.helpers.blocks import plan_of

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=40)


def requests(lengths: list[int]) -> list[EncodedRequest]:
    return [EncodedRequest(i, tuple(range(n)), SamplingParams(), 8) for i, n in enumerate(lengths)]


@given(lengths=LENGTHS, size=st.integers(1, 6))
def test_requests_are_spread_over_as_few_batches_as_hold_them(
    lengths: list[int], size: int
) -> None:
    found = grouped(requests(lengths), size)
    assert [r.index for group in found for r in group] == list(range(len(lengths)))
    fewest = -(-len(lengths) // size)
    each = -(-len(lengths) // fewest)
    *full, last = [len(group) for group in found]
    assert full == [each] * len(full)
    assert 1 <= last <= each
    assert len(found) <= fewest


def waiting(lengths: list[int], batch_size: int, num_batches: int, schedule: str) -> Waiting:
    policy = Policy(batch_size=batch_size, num_batches=num_batches, schedule=schedule)
    shape = BlockShape((batch_size,) * num_batches, (96,) * num_batches, 8)
    collector = Generation(None, (), lambda request, output: None)
    return Waiting(plan_of(policy, shape), Listed(requests(lengths)), collector)


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([5] * 9, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8]]]),
        ([5] * 13, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10], [11, 12]]]),
        ([40, 3, 17, 3, 90, 16], [[[1, 3, 5], [2, 0, 4]]]),
        ([40, 3, 17, 3, 90], [[[1, 3, 2], [0, 4]]]),
    ],
)
def test_neighbours_in_length_enter_together(
    lengths: list[int], groups: list[list[list[int]]]
) -> None:
    queue, found = waiting(lengths, 4, 2, "zigzag"), []
    while entered := queue.enter((), None):
        found.append([[r.index for r in queue.members[running]] for running in entered])
        assert len({queue.given(running).size for running in entered}) == 1
    assert found == groups


def test_batches_enter_where_there_are_rows_for_them() -> None:
    queue = waiting([5] * 20, 4, 2, "continuous")
    first, second = queue.enter((), None)
    assert not queue.enter((first, second), None)
    (third,) = queue.enter((second,), None)
    first.close()
    assert set(queue.members) == {second, third}
    (fourth,) = queue.enter((), 1)
    assert [running.number for running in (second, third, fourth)] == [1, 2, 3]
    assert [len(queue.members[running]) for running in (second, third, fourth)] == [4, 4, 4]


@given(lengths=LENGTHS, extra=st.integers(0, 3))
def test_padding_is_on_the_left(lengths: list[int], extra: int) -> None:
    """To the longest one's bucket; a row that no prompt is for holds one token."""
    rows = requests(lengths)
    ids, first = pad_prompts(rows, len(rows) + extra, pad_id=-1, max_positions=96)
    assert ids.shape == (len(rows) + extra, padded_length(max(lengths), 96))
    for request, row, start in zip(rows, ids, first, strict=False):
        assert (row[:start] == -1).all()
        np.testing.assert_array_equal(row[start:], request.prompt_ids)
    assert (first[len(rows) :] == ids.shape[1] - 1).all()
    assert (ids[len(rows) :] == -1).all()


@pytest.mark.parametrize(
    ("tokens", "padded"), [(1, 16), (16, 16), (17, 32), (90, 96), (97, 100), (100, 100)]
)
def test_prompts_are_padded_to_buckets(tokens: int, padded: int) -> None:
    assert padded_length(tokens, max_positions=100) == padded


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GB", 16 * 10**9), ("512MiB", 512 << 20), ("1.5g", 1_500_000_000), ("7", 7), (9, 9)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "16 apples", "1e3"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UserError, match="16GB"):
        parse_bytes(text)


def test_two_file_tokenizer(tmp_path: Path) -> None:
    """The tokenizer reads what OPT repositories ship: vocab.json and merges.txt, with the special
    tokens named beside them."""
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "b": 5, "ab": 6, "Ġ": 7, "Ġa": 8}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ a\n")
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "pad_token": "<pad>"})
    )
    tokenizer = Tokenizer(tmp_path, bos_id=2)
    assert tokenizer.encode("ab a") == [2, 6, 8]
    assert tokenizer.decode([2, 6, 8, 1, 2]) == "ab a"


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        Tokenizer(tmp_path, None)


class Stream:
    """Requests that come when a test says so."""

    is_ended = False

    def __init__(self) -> None:
        self.ready: list[EncodedRequest] = []

    def take(self, max_count: int) -> Sequence[EncodedRequest]:
        taken, self.ready = self.ready[:max_count], self.ready[max_count:]
        return taken

    def wait(self) -> bool:
        return bool(self.ready)


def test_few_requests_of_a_stream_wait_for_others() -> None:
    """A quarter of the rows that run enters at once; fewer after two waves for each batch; and
    all do when no more will come."""
    policy = Policy(batch_size=64, num_batches=1)
    stream, asked = Stream(), requests([5] * 40)
    collector = Generation(None, (), lambda request, output: None)
    plan = plan_of(policy, BlockShape((64,), (96,), 8))
    assert plan.is_resident
    queue = Waiting(plan, stream, collector)
    stream.ready = asked[:16]
    going = [*queue.enter([], None)]
    assert sum(running.rows for running in going) == 16
    stream.ready = asked[16:17]
    entered = [len(queue.enter(going, None)) for _ in range(ENTRY_WAVES + 1)]
    assert entered == [0] * ENTRY_WAVES + [1]
    stream.ready = asked[17:21]
    assert queue.enter(going, None), "a quarter of the rows"
    stream.ready = asked[21:22]
    assert not queue.enter(going, None)
    stream.is_ended = True
    assert queue.enter(going, None)
