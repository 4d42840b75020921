"""The loop over a block's steps: what it asks of every backend, and the memory that it reserves."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.policy.parts import WeightsPart
from flexgen_jax.policy.policy import Policy
from flexgen_jax.policy.shapes import BlockShape
from flexgen_jax.schedule.buffers import Ring
from flexgen_jax.schedule.ledger import BudgetError, Ledger
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.schedule.running import CachedPart, ReplacedPart
from flexgen_jax.search.memory import Idle, dry_run, peak_bytes, planned_ledger
from flexgen_jax.search.simulate import simulate
from tests.helpers.blocks import BACKENDS, Call, plan_of, run_block
from tests.helpers.cases import examples
from tests.helpers.models import BASE
from tests.helpers.profiles import costs_of

ROWS, PROMPT, TOKENS = 2, 8, 10
SHAPE = BlockShape((ROWS,) * 3, (PROMPT,) * 3, TOKENS)
LAYERS, HIDDEN = BASE["num_hidden_layers"], BASE["hidden_size"]
BLOCK = 2 * 4 * ROWS * 4 * HIDDEN
"""Bytes of a KV block of 4 tokens in fp32."""


def of(*percent: float, **options: Any) -> Policy:
    options = {"attention": "host", "kv_block_tokens": 4, "schedule": "zigzag", **options}
    return Policy.from_percent(*percent, batch_size=ROWS, num_batches=3, **options)


def first(calls: list[Call], *start: Any) -> int:
    """The index of the first call that begins like this."""
    return next(i for i, call in enumerate(calls) if call[: len(start)] == start)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("policy", "unified"),
    [
        (of(0, 0, 0, 0, 0, 0), False),
        (of(0, 0, 0, 0, 0, 0, overlap=False), True),
        (of(30, 40, 20, 50, 0, 50, schedule="row"), False),
        (of(0, 50, 0, 50, 0, 0, cache_bits=4, weight_bits=4), True),
        (of(0, 100, 0, 100, 0, 100, attention="device"), False),
    ],
    ids=["disk", "no-overlap", "row", "packed", "copied"],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_all_backends_are_asked_the_same(
    policy: Policy, unified: bool, seed: int, tmp_path: Path
) -> None:
    """With the same answers to what is done when, the runtime and the simulator get the same calls,
    and the same memory is reserved."""
    answers = random.Random(seed).choices([True, False], k=100_000)
    found = [
        run_block(name, policy, SHAPE, tmp_path, unified, lambda n: answers[n]) for name in BACKENDS
    ]
    (recorder, ledger), (other, second) = found
    assert recorder.calls == other.calls
    assert ledger.peak == second.peak
    assert {name for name, *_ in recorder.calls} >= {"begin", "fetch", "copy", "compute", "finish"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_disk_reads_begin_ahead_of_their_use(backend: str, tmp_path: Path) -> None:
    """Those of weights two layers ahead, of KV blocks three steps, of hidden states two."""
    recorder, _ = run_block(backend, of(0, 0, 0, 0, 0, 0), SHAPE, tmp_path)
    calls = recorder.calls
    weights, _ = zip(*recorder.fetched(WeightsPart).items(), strict=True)
    third = next(keys for keys in weights if keys[0][0].startswith("decoder.2."))
    assert recorder.fetched(WeightsPart)[third] < first(calls, "compute", (0, 1, 1, 1))
    assert recorder.fetched(CachedPart)[1, 0, 1] < first(calls, "compute", (1, 1, 1, 6))
    assert recorder.fetched(ReplacedPart)[2, 0] < first(calls, "compute", (0, 2, 2, 2))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_copied_while_the_layer_before_computes(
    backend: str, overlap: bool, tmp_path: Path
) -> None:
    policy = of(0, 100, 100, 0, 100, 0, overlap=overlap)
    calls = run_block(backend, policy, SHAPE, tmp_path)[0].calls
    copied = next(
        i for i, (name, *what) in enumerate(calls) if name == "copy" and "decoder.1." in str(what)
    )
    assert (copied < first(calls, "compute", (0, 1, 0, 1))) == overlap
    assert copied < first(calls, "compute", (0, 2, 0, 2))


def is_piece(part: Any) -> bool:
    """Whether a part is one tensor of a decoder layer, which is copied by itself."""
    kind, keys = part[0], part[1]
    return kind == "WeightsPart" and len(keys) == 1 and keys[0].startswith("decoder.")


@pytest.mark.parametrize("attention", ["device", "host"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_travel_in_pieces_behind_what_is_needed_sooner(
    backend: str, attention: str, tmp_path: Path
) -> None:
    """A piece before each step of the visit before theirs is dispatched, and behind the copies of
    hidden states and KV blocks that begin with it."""
    policy = of(0, 100, 0, 100, 0, 100, attention=attention)
    calls = run_block(backend, policy, SHAPE, tmp_path)[0].calls
    weights, others = [0], [0]
    for name, *what in calls:
        if name == "compute":
            weights.append(0)
            others.append(0)
        elif name == "copy" and what[0][0] != "WeightsPart":
            assert not weights[-1], "weights went first"
            others[-1] += 1
        elif name == "copy" and is_piece(what[0]):
            weights[-1] += 1
    # Token 2: embedding, decoder layers and head, of three batches; six tensors in each decoder.
    begin = 2 * 3 * (LAYERS + 2)
    pieces = [weights[begin + 3 * n :][:3] for n in range(LAYERS)]
    assert all(sum(visit) == 6 and min(visit) >= 1 for visit in pieces), pieces
    # Of each step in the decoder layers, one KV cache; the hidden states are small.
    assert sum(others[begin : begin + 3 * (LAYERS + 2)]) >= 3 * LAYERS


def test_one_batch_gets_all_weights_before_its_only_step(tmp_path: Path) -> None:
    policy = of(0, 100, 100, 0, 100, 0)
    shape = BlockShape((ROWS,), (PROMPT,), 3)
    calls = run_block("runtime", policy, shape, tmp_path)[0].calls
    copied = [
        i
        for i, (name, *what) in enumerate(calls)
        if name == "copy" and is_piece(what[0]) and what[0][1][0].startswith("decoder.1.")
    ]
    before, after = first(calls, "compute", (0, 0, 0, 0)), first(calls, "compute", (0, 1, 0, 1))
    assert len(copied) == 6 * 3
    assert all(before < i < after for i in copied[:6])


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_states_of_prompts_go_to_disk(backend: str, tmp_path: Path) -> None:
    """All but those that the last layer makes of one token each."""
    calls = run_block(backend, of(100, 0, 100, 0, 0, 0), SHAPE, tmp_path)[0].calls
    written = [call for call in calls if call[0] == "write" and call[1][0] == "ReplacedPart"]
    assert len(written) == 3 * LAYERS


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_block_is_written_once_and_read_for_every_later_token(
    backend: str, tmp_path: Path
) -> None:
    calls = run_block(backend, of(100, 0, 0, 0, 100, 0), SHAPE, tmp_path)[0].calls
    # A block for each prompt, and two of 4 new tokens each: the last of 9 is in an open block.
    written = [call for call in calls if call[0] == "write" and call[1][0] == "SealedPart"]
    assert len(written) == LAYERS * 3 * (1 + 2)
    kept = [call for call in calls if call[0] == "keep" and isinstance(call[1][0], int)]
    assert len(kept) == LAYERS * 3 * (TOKENS - 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_steps_wait_for_the_disk(backend: str, tmp_path: Path) -> None:
    """If no write ever seems to be done, a fourth one waits for the first."""
    policy = of(100, 0, 0, 0, 100, 0)
    calls = run_block(backend, policy, SHAPE, tmp_path, True, lambda n: False)[0].calls
    pending = accumulate({"write": 1, "wait": -1}.get(call[0], 0) for call in calls)
    assert max(pending) == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_reserved_bytes_are_those_of_the_formula(backend: str, tmp_path: Path) -> None:
    """With everything on the host, the device has a layer's weights and the next one's, a batch's
    hidden states and the next one's."""
    policy = of(0, 100, 0, 100, 0, 100)
    layer = 4 * (4 * HIDDEN**2 + 2 * HIDDEN * BASE["ffn_dim"])
    tables = 4 * (BASE["vocab_size"] + BASE["max_position_embeddings"] + 2) * HIDDEN
    state, token = 4 * ROWS * PROMPT * HIDDEN, BLOCK // 4
    _, ledger = run_block(backend, policy, SHAPE, tmp_path)
    before = planned_ledger(plan_of(policy, SHAPE)).used["device"]
    assert ledger.peak["device"] == before + 2 * layer + 2 * state
    # At the end: all prompts and new tokens but one. Hidden states of one token are on the device.
    cached = LAYERS * 3 * (PROMPT + TOKENS - 1) * token
    assert ledger.peak["host"] == LAYERS * layer + tables + cached
    placed = {"device": before, "host": LAYERS * layer + tables, "disk": 0}
    if backend == "simulator":
        assert ledger.used == placed
    else:  # the run has given back the weights, too, but not the temporaries of the test
        assert ledger.used["host"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_open_block_of_the_disk_is_held_in_ram(backend: str, tmp_path: Path) -> None:
    """While prompts are computed, there is one of every layer and batch, of 4 tokens, beside what
    waits for the disk; nothing that was written is held any longer."""
    policy = of(100, 0, 0, 0, 100, 0)
    shape = BlockShape((ROWS,), (PROMPT,), 5)
    _, ledger = run_block(backend, policy, shape, tmp_path, True, lambda n: True)
    # Read buffers of a prompt's block: three for the steps ahead, one for that being computed.
    reads = min(4, LAYERS) * 2 * BLOCK
    assert ledger.peak["host"] == LAYERS * BLOCK + reads
    assert ledger.peak["disk"] == LAYERS * 2 * BLOCK


PERCENT = st.sampled_from([0, 10, 30, 50, 90, 100])


@st.composite
def policies(draw: st.DrawFn, uses_disk: bool) -> Policy:
    """Policies with whole tensors and blocks in several tiers."""

    def pair() -> tuple[float, float]:
        device = draw(PERCENT)
        return device, (100 - device) * (draw(st.sampled_from([0.0, 0.5, 1.0])) if uses_disk else 1)

    return Policy.from_percent(
        *(*pair(), *pair(), *pair()),
        batch_size=draw(st.sampled_from([1, 3])),
        num_batches=draw(st.integers(1, 4)),
        schedule=draw(st.sampled_from(["zigzag", "row"])),
        overlap=draw(st.booleans()),
        attention=draw(st.sampled_from(["host", "device"])),
        weight_bits=draw(st.sampled_from([16, 4])),
        cache_bits=draw(st.sampled_from([16, 8])),
        attention_sparsity=draw(st.sampled_from([1.0, 0.5])),
        kv_block_tokens=draw(st.sampled_from([2, 4, 32])),
    )


@examples(25)
@given(policies(uses_disk=False), st.sampled_from([1, 2, 3, 10, 33]), st.booleans())
def test_the_estimate_is_exact_in_memory(policy: Policy, tokens: int, unified: bool) -> None:
    """To the byte, though it looks at a few tokens only."""
    batches = policy.num_batches
    shape = BlockShape((policy.batch_size,) * batches, (16,) * batches, tokens)
    plan = plan_of(policy, shape, unified)
    assert peak_bytes(plan) == dry_run(plan)


@examples(20)
@given(policies(uses_disk=True), st.sampled_from([1, 2, 10, 33]), st.booleans())
def test_the_estimate_is_a_bound_with_a_disk(policy: Policy, tokens: int, unified: bool) -> None:
    """Of every run, however fast the disk is."""
    batches = policy.num_batches
    shape = BlockShape((policy.batch_size,) * batches, (16,) * batches, tokens)
    plan = plan_of(policy, shape, unified)
    bound, worst = peak_bytes(plan), dry_run(plan)
    costs = costs_of(plan.config, plan.dtype, policy, unified=unified)
    found = simulate(costs, plan).peak_bytes
    for tier, nbytes in bound.items():
        assert found[tier] <= worst[tier] <= nbytes


@pytest.mark.parametrize(
    ("percent", "options"),
    [
        ((0, 0, 0, 0, 0, 0), {}),
        ((0, 0, 0, 0, 100, 0), {"cache_bits": 4, "weight_bits": 4}),
        ((0, 50, 0, 30, 0, 50), {"attention": "device", "kv_block_tokens": 8}),
    ],
)
@pytest.mark.parametrize("unified", [True, False])
def test_the_bound_is_near(percent: tuple[float, ...], options: Any, unified: bool) -> None:
    """Within 4 % of a simulated run of a model of some size."""
    policy = Policy.from_percent(*percent, batch_size=16, num_batches=4, **options)
    costs = costs_of(known_shape("facebook/opt-1.3b"), "float16", policy, unified=unified)
    plan = costs.plan(BlockShape((16,) * 4, (128,) * 4, 40))
    found, bound = simulate(costs, plan).peak_bytes, peak_bytes(plan)
    for tier, nbytes in found.items():
        assert nbytes <= bound[tier] <= 1.04 * nbytes, tier


def test_a_buffer_is_used_again_when_its_step_is_finished() -> None:
    plan = plan_of(of(0, 0, 0, 0, 0, 0), SHAPE)
    small, large = (plan.layouts.buffer([Storage((size,), "float32")]) for size in (10, 100))
    ring = Ring(Idle(), Ledger({}))
    (buffer,) = ring.acquire([small])
    ring.release([buffer], after=3)
    ring.finished = 2
    assert ring.acquire([small])[0] is not buffer
    ring.finished = 3
    acquired = ring.acquire([small, large])
    assert acquired[0] is buffer and acquired[1].layout is large
    assert ring.most == 2 * 40 + 400


def test_free_buffers_make_room() -> None:
    """But only those whose step is finished, and only where more than planned would be in use."""
    plan = plan_of(of(0, 0, 0, 0, 0, 0), SHAPE)
    first, second, third = (
        plan.layouts.buffer([Storage((size,), "float32")]) for size in (25, 50, 75)
    )
    ledger = Ledger({})
    ring = Ring(Idle(), ledger)
    ledger.reserve("host", 100)  # by somebody else
    with ring.relieved({"device": 0, "host": 500, "disk": 0}):
        ring.release(ring.acquire([first]), after=1)
        ring.release(ring.acquire([second]), after=2)
        ring.finished = 1
        assert not ring.has_room([third])
        ring.acquire([third])  # 700 bytes, 600 without the first
        assert ledger.used["host"] == 600
        ring.finished = 2
        assert not ring.has_room([third])
        assert ring.has_room([second])
        ring.acquire([third])
        assert ledger.used["host"] == 700
        ledger.reserve("host", 1)  # nothing is left to give up
    ring.close()
    assert ledger.used["host"] == 101


def test_a_budget_ends_a_loop_and_everything_is_released(tmp_path: Path) -> None:
    plan = plan_of(of(0, 0, 0, 0, 0, 0), SHAPE)
    least = dry_run(plan)["host"]
    ledger = Ledger({"host": least - 1})
    with pytest.raises(BudgetError, match="--host-memory"):
        BlockLoop(plan, Idle(), ledger).run()
    assert ledger.used == {"device": 0, "host": 0, "disk": 0}
    BlockLoop(plan, Idle(), Ledger({"host": least})).run()


@pytest.mark.parametrize("failing", ["wait", "write", "keep", "fetch", "compute"])
def test_an_error_of_the_backend_leaves_nothing_reserved(failing: str) -> None:
    """Such as a full disk: the session goes on with what is left of its budgets."""

    class Full(Idle):
        def __getattribute__(self, name: str) -> Any:
            if name == failing:
                raise OSError(28, "No space left on device")
            return super().__getattribute__(name)

    ledger = Ledger({})
    with pytest.raises(OSError, match="No space"):
        BlockLoop(plan_of(of(0, 0, 0, 0, 0, 0), SHAPE), Full(), ledger).run()
    assert ledger.used == {"device": 0, "host": 0, "disk": 0}


def test_a_state_takes_no_more_memory_for_a_longer_prompt() -> None:
    """Of a prompt of 32,768 tokens only the layers that attend keep more than of one of 4,096, and
    chunks take as much."""
    config = known_shape("Qwen/Qwen3.6-35B-A3B")
    policy = Policy.from_percent(
        *(100, 0) * 3, batch_size=1, num_batches=1, prefill_chunk=2048, kv_block_tokens=2048
    )
    short, long = (
        peak_bytes(plan_of(policy, BlockShape((1,), (tokens,), 8), config=config))
        for tokens in (4096, 32768)
    )
    attending = [layer for layer in model_spec(config).decoders if layer.attends]
    assert len(attending) == 10
    kept = sum(layer.row_size for layer in attending) * 4
    assert long["device"] - short["device"] == (32768 - 4096) * kept
