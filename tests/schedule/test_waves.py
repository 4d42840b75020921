"""Batches that enter and leave between waves: the memory that is reserved for them, without
arrays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flexgen_jax.engine.prediction import Shapes
from flexgen_jax.models.families import read_config
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Policy, growing_blocks
from flexgen_jax.policy.schedules import SCHEDULES
from flexgen_jax.policy.shapes import BlockShape
from flexgen_jax.requests.batching import Waiting
from flexgen_jax.requests.feed import Listed
from flexgen_jax.requests.padding import padded_length
from flexgen_jax.requests.prefixes import padded_prefix
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.requests.sampling import SamplingParams
from flexgen_jax.schedule.backend import Handle, Inputs
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.schedule.shrinking import fewer_rows
from flexgen_jax.schedule.waves import Step
from flexgen_jax.search.memory import Idle, peak_bytes, planned_ledger
from tests.helpers.blocks import plan_of
from tests.helpers.cases import examples
from tests.helpers.numpy_llama import LLAMA, MIXTRAL

LONGEST, MOST = 48, 30
"""The most tokens of a prompt, and of a text."""

SHARED = 20
"""Tokens of a prefix."""


class Ending(Idle):
    """A backend whose texts end by themselves, after the tokens of `ends` by request."""

    def __init__(self, head: int, queue: Waiting, ends: Sequence[int]) -> None:
        super().__init__()
        self._head, self._queue, self._ends = head, queue, ends
        self.steps: list[Step] = []
        self.finished: set[int] = set()

    def compute(self, step: Step, inputs: Inputs) -> Handle:
        self.steps.append(step)
        return super().compute(step, inputs)

    def shrink(self, step: Step, rows: int) -> None:
        members = self._queue.members[step.batch]
        left = [row for row, r in enumerate(members) if r.index not in self.finished]
        others = [row for row in range(len(members)) if row not in left]
        assert len(left) <= rows
        self._queue.keep(step.batch, [*left, *others][:rows])

    def finish(self, step: Step, computed: Handle) -> int | None:
        if step.layer < self._head or step.batch not in self._queue.members:
            return None
        members = self._queue.members[step.batch]
        self.finished |= {r.index for r in members if step.token + 1 >= self._ends[r.index]}
        return sum(r.index not in self.finished for r in members)


def run_waves(plan: BlockPlan, requests: Sequence[EncodedRequest], ends: Sequence[int]) -> Ledger:
    ledger, peaks = planned_ledger(plan), peak_bytes(plan)
    before = ledger.used
    queue = Waiting(plan, Listed(requests), Shapes(None, (), lambda request, output: None))
    backend = Ending(len(plan.spec.layers) - 1, queue, ends)
    BlockLoop(plan, backend, ledger, arrivals=queue, peaks=peaks).run()
    assert backend.finished == {r.index for r in requests}
    assert not queue.members
    assert ledger.used == before
    return ledger


def request_of(index: int, own: int, new: int, prefix: int) -> EncodedRequest:
    """Returns a request with one of several prefixes, counted from 1, or with none."""
    shared = (prefix,) * SHARED if prefix else ()
    cuts = (SHARED,) if prefix else ()
    return EncodedRequest(index, (*shared, *[9] * own), SamplingParams(), new, shared=cuts)


@examples(40)
@example(  # one batch's chunks go on alone, after the other has left
    seed=1730,
    schedule="diagonal",
    percent=(0, 100, 0, 100, 0, 100),
    rows=1,
    batches=2,
    bits=16,
    attention="host",
    unified=False,
)
@example(  # a batch ends while a step of it is under way, and the next one's weights are read
    seed=318,
    schedule="continuous",
    percent=(0, 0, 0, 0, 0, 0),
    rows=1,
    batches=1,
    bits=16,
    attention="host",
    unified=False,
)
@given(
    seed=st.integers(0, 10_000),
    schedule=st.sampled_from(list(SCHEDULES)),
    percent=st.sampled_from(
        [
            (100, 0, 100, 0, 100, 0),
            (0, 100, 0, 100, 0, 100),
            (0, 0, 0, 0, 0, 0),
            (20, 30, 40, 30, 50, 20),
            (0, 50, 0, 30, 100, 0),
        ]
    ),
    rows=st.sampled_from([1, 3, 8]),
    batches=st.sampled_from([1, 2, 4]),
    bits=st.sampled_from([16, 4]),
    attention=st.sampled_from(["host", "device"]),
    unified=st.booleans(),
)
def test_what_is_reserved_stays_within_the_plan(
    seed: int,
    schedule: str,
    percent: tuple[int, ...],
    rows: int,
    batches: int,
    bits: int,
    attention: str,
    unified: bool,
) -> None:
    """Whatever ends when; everything that enters leaves, and all memory comes back."""
    rng = random.Random(seed)
    policy = Policy.from_percent(
        *percent,
        batch_size=rows,
        num_batches=batches,
        schedule=schedule,
        cache_bits=bits,
        attention=attention,
        kv_block_tokens=rng.choice([4, 8]),
        prefill_chunk=rng.choice([5, 16, 2048]),
        overlap=rng.random() < 0.8,
    )
    prefixes = rng.choice([0, 0, 1, 3])
    requests = [
        request_of(
            i, rng.randint(1, LONGEST), rng.randint(1, MOST), rng.choice(range(prefixes + 1))
        )
        for i in range(rng.randint(1, 40))
    ]
    ends = [rng.randint(1, r.max_tokens) for r in requests]
    longest = padded_length(max(len(r.own_ids) for r in requests), LONGEST)
    most = max(r.max_tokens for r in requests)
    shape = BlockShape(
        batch_sizes=(rows,) * batches,
        prompt_lens=(longest,) * batches,
        gen_len=most,
        prefix=padded_prefix(SHARED) * (prefixes > 0),
        prefixes=min(prefixes, rng.randint(1, 3)),
    )
    plan = plan_of(policy, shape, unified)
    bound, ledger = peak_bytes(plan), run_waves(plan, requests, ends)
    for tier, nbytes in ledger.peak.items():
        assert nbytes <= bound[tier], tier


MIXTURE = MIXTRAL | {"num_local_experts": 8}
"""Tokens of a few rows choose few of the experts."""

FEW_HEADS = LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 1}
"""Hidden states take more than the cache of a layer."""


@pytest.mark.parametrize(
    ("raw", "rows", "batches", "prompt", "new"),
    [
        (MIXTURE, 2, 1, 16, (30, 27, 30)),  # a row, with all experts, beside others' last tokens
        (MIXTURE, 2, 2, 16, (30, 30, 30, 27, 30)),
        (FEW_HEADS, 5, 1, 48, (2, 2, 2, 2, 8, 2, 2, 2, 2)),  # four rows beside one
    ],
)
@pytest.mark.parametrize("schedule", ["continuous", "diagonal"])
def test_rows_that_enter_beside_a_batch_that_has_shrunk_are_planned_for(
    raw: dict[str, Any], rows: int, batches: int, prompt: int, new: Sequence[int], schedule: str
) -> None:
    """The plan is near what they take, of the device."""
    policy = Policy.from_percent(
        *(0, 0, 100, 0, 0, 100),
        batch_size=rows,
        num_batches=batches,
        schedule=schedule,
        kv_block_tokens=4,
    )
    shape = BlockShape((rows,) * batches, (prompt,) * batches, max(new))
    plan = plan_of(policy, shape, config=read_config(raw))
    requests = [request_of(i, prompt, tokens, prefix=0) for i, tokens in enumerate(new)]
    found, bound = run_waves(plan, requests, new).peak["device"], peak_bytes(plan)["device"]
    assert found <= bound <= 1.03 * found


def test_what_is_copied_for_a_batch_that_enters_is_not_copied_again() -> None:
    """Where another one, as is known only then, has had its last token: the embedding, on its way
    already, does not stay until it is needed again."""
    plan = plan_of(
        Policy.from_percent(0, 100, 100, 0, 100, 0, batch_size=4, kv_block_tokens=4),
        BlockShape((4,), (LONGEST,), 2),
        config=read_config(LLAMA | {"num_key_value_heads": 1, "num_hidden_layers": 2}),
    )
    requests = [request_of(i, LONGEST, 2, prefix=0) for i in range(8)]
    found, bound = run_waves(plan, requests, [2] * 8).peak["device"], peak_bytes(plan)["device"]
    assert found <= bound


@given(st.integers(1, 2000))
def test_batches_shrink_to_few_numbers_of_rows(rows: int) -> None:
    found = fewer_rows(rows)
    assert rows <= found <= 4 * rows
    assert fewer_rows(found) == found, "there it stays"
    if rows > 64:
        assert found <= 1.5 * rows


@given(st.integers(1, 5000), st.sampled_from([4, 8, 32]))
def test_blocks_in_ram_grow_with_the_text(gen_len: int, size: int) -> None:
    blocks = growing_blocks(gen_len, size)
    assert sum(blocks) == gen_len - 1
    assert len(blocks) <= 2 + (gen_len // size).bit_length()
    assert all(block <= max(size, sum(blocks[:n])) for n, block in enumerate(blocks))
