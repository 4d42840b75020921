"""Stages: the division of layers, and what a stage is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.models.families import read_config
from flexgen_jax.models.shapes import raw_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import BatchShape, BlockShape, Setting
from flexgen_jax.schedule.admission import Admission
from flexgen_jax.schedule.stages import (
    Slot,
    Slots,
    Told,
    divided,
    divisions,
    groups_of,
    split_layers,
    told,
)
from tests.helpers.blocks import described_step


def config(layers: int, vocab: int = 50272):
    raw = {**raw_shape("facebook/opt-125m"), "num_hidden_layers": layers, "vocab_size": vocab}
    return read_config(raw)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([8, 50272, 500_000]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_no_other_division_has_a_smaller_largest_stage(
    layers: int, stages: int, vocab: int, share: float
):
    if stages > layers:
        return
    spec = model_spec(config(layers, vocab))
    costs = [layer.active_size for layer in spec.decoders]
    costs[-1] += share * spec.head.large_size
    found = split_layers(spec, stages, share)
    assert [n for part in found for n in part] == list(range(layers))
    assert all(found)
    largest = max(sum(costs[n] for n in part) for part in found)
    for cuts in combinations(range(1, layers), stages - 1):
        edges = [0, *cuts, layers]
        others = [sum(costs[a:b]) for a, b in pairwise(edges)]
        assert largest <= max(others)


def test_the_head_counts_less_for_prompts() -> None:
    found = divisions(model_spec(config(12)), 2)  # the head has the products of five layers
    assert found[0] == (range(9), range(9, 12))
    assert found[-1] == (range(6), range(6, 12))
    assert len(set(found)) == len(found)
    assert divisions(model_spec(config(4, vocab=8)), 2) == [(range(2), range(2, 4))]


def test_parts_have_all_tensors_of_the_model_once() -> None:
    whole = config(5)
    parts = [model_spec(whole.part(part)) for part in split_layers(model_spec(whole), 3)]
    assert [layer.name for spec in parts for layer in spec.decoders] == [
        f"decoder layer {n}" for n in range(5)
    ]
    keys = [key for spec in parts for key in spec.tensors]
    twice = "embedding.tokens"  # the tied table: of the embedding and of the head
    assert sorted(keys) == sorted([*model_spec(whole).tensors, twice])
    assert not parts[1].embedding.tensors and not parts[1].head.tensors
    assert not parts[0].head.tensors and parts[2].head.tensors
    assert len(parts[1].decoder_kinds) == 1


def made_plan(part: range | None = None) -> BlockPlan:
    whole = config(4)
    own = whole if part is None else whole.part(part)
    policy = Policy(batch_size=2, num_batches=3, prefill_chunk=16)
    shape = BlockShape((2,) * 3, (32,) * 3, 4)
    return BlockPlan(Setting(own, "float32", unified=True), policy, shape)


def test_steps_are_those_of_the_slots_in_their_order() -> None:
    slots = Slots(made_plan(range(0, 2)))
    assert slots.take() is None
    slots.tell(Slot(0, (Told(0, -1, 32), Told(1, -1, 32)), dict.fromkeys((0, 1), SHAPE)))
    slots.tell(Slot(1, (Told(2, 0, 4),), {2: SHAPE}, leaving=(0,)))
    slots.tell(Slot(2, ()))
    slots.end()
    found = list(iter(slots.take, None))
    # Chunks of prompts go on to the next stage, too.
    expected = [(-1, layer, batch, layer) for layer in range(4) for batch in (0, 1)]
    expected += [(0, layer, 2, 4 + layer) for layer in range(4)]
    assert list(map(described_step, found)) == expected
    leaving = slots.leaving()
    assert ([running.number for running in leaving], list(slots.leaving())) == ([0], [])
    assert (slots.number_of(found[0]), slots.number_of(found[-1])) == (0, 1)
    leaving[0].close()
    with pytest.raises(KeyError):
        slots.number_of(found[0])
    assert not slots.wait()


SHAPE = BatchShape(2, 32, 4)


def test_the_last_stage_chooses_no_token_before_a_prompt_ends() -> None:
    slots = Slots(made_plan(range(2, 4)))
    slots.tell(Slot(0, (Told(0, -1, 32),), {0: SHAPE}))
    assert [step.layer for step in iter(slots.take, None)] == [0, 1, 2]
    slots.tell(Slot(1, (Told(0, 0, 32),)))
    assert [step.layer for step in iter(slots.take, None)] == [0, 1, 2, 3]


def test_a_shift_is_as_long_as_the_largest_that_is_sent() -> None:
    slots = Slots(made_plan())
    for number, size in enumerate((5, 1, 0, 2)):
        slots.tell(Slot(number, (Told(number, 0, size),), {number: SHAPE}))
    slots.end()
    assert [slots.sent(n, 2) for n in range(5)] == [5, 1, 0, 2, None]
    slots = Slots(made_plan())
    for number, size in enumerate((5, 1, 0, 2)):
        slots.tell(Slot(number, (Told(number, 0, size),), {number: SHAPE}))
    slots.end()
    # Stage 1 of three sends what stage 0 has sent a slot before.
    assert [slots.sent(n, 3) for n in range(6)] == [5, 5, 1, 2, 2, None]


def test_there_are_groups_for_all_stages() -> None:
    assert groups_of(1) == (1,)
    assert all(min(groups_of(n)) > n for n in range(2, 9))


def test_batches_are_divided_into_groups() -> None:
    assert [divided(n, 2) for n in (1, 3, 5, 8, 20)] == [3, 3, 5, 8, 8]
    assert divided(20, 1) == 1


@pytest.mark.parametrize("rows", [1, 2])
def test_sizes_are_rows_times_tokens(rows: int) -> None:
    admission = Admission(made_plan())
    (running,) = admission.enter([replace(SHAPE, rows=rows)], is_first=True, numbers=[7])
    assert told([(running, -1), (running, 0), (running, 1)]) == (
        Told(7, -1, 16 * rows),
        Told(7, 0, 16 * rows),
        Told(7, 1, rows),
    )
