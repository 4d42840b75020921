"""A prefix that prompts share is computed once, and changes no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.offload import executor
from flexgen_jax.requests.requests import MIN_PREFIX_TOKENS, shared_tokens
from flexgen_jax.schedule.waves import Step
from tests.helpers.numpy_opt import reference

SHARED = 40
LENGTHS = (9, 1, 17, 30, 4, 12)
TOKENS = (9, 4, 12, 1, 7, 10)
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in TOKENS]


def beginning(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, 96, size=SHARED).tolist()


def prompts(seed: int = 0) -> list[list[int]]:
    """The last one does not begin with the prefix."""
    rng = np.random.default_rng(7)
    found = [beginning(seed) + rng.integers(4, 96, size=n).tolist() for n in LENGTHS]
    return [*found[:-1], found[-1][5:]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps of prefixes that are computed."""
    found: list[Step] = []
    real = executor.BlockRun.compute

    def compute(self: executor.BlockRun, step: Step, inputs: object) -> object:
        found.extend([step] if step.batch.is_prefix else [])
        return real(self, step, inputs)

    monkeypatch.setattr(executor.BlockRun, "compute", compute)
    return found


def test_a_stream_serves_several_prefixes(
    checkpoint: Callable[[], Path], steps: list[Step]
) -> None:
    """Requests with another prefix, or none, wait for a run of their own, but not for ever."""
    model, ids = reference(checkpoint()), {n: prompts(n)[0] for n in range(3)}
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    expected = {n: model.greedy(row, 3) for n, row in ids.items()}
    done: list[str] = []

    def requests() -> Iterator[Request]:
        for number in range(400):
            assert number < 60 or any(name.endswith("-1") for name in done), "it starves"
            kind = 1 if number == 5 else 2 if number == 9 else 0
            prefix = None if kind == 2 else beginning(kind)
            yield Request(f"{number}-{kind}", None, ids[kind], params, prefix)

    policy = Policy(batch_size=2, num_batches=2)
    with LLM(checkpoint(), dtype="float32", policy=policy) as llm:
        stream = llm.stream(requests())
        for result in stream:
            assert result.token_ids == expected[int(result.id[-1])]
            done.append(result.id)
            if len(done) == 80:
                break
        stream.close()
    assert {name[-1] for name in done} == {"0", "1", "2"}
    assert 2 * 4 <= len(steps) <= 4 * 4


def test_sparse_attention_shares_nothing(checkpoint: Callable[[], Path], steps: list[Step]) -> None:
    found = []
    for prefix in (None, beginning(0)):
        policy = Policy(batch_size=3, attention_sparsity=0.3)
        with LLM(checkpoint(), dtype="float32", policy=policy) as llm:
            results = llm.generate(
                prompt_token_ids=prompts(), sampling_params=PARAMS, prefix=prefix
            )
        found.append([result.token_ids for result in results])
    assert found[0] == found[1]
    assert not steps


def test_a_text_as_prefix_needs_a_tokenizer() -> None:
    with (
        LLM("facebook/opt-125m", dummy_weights=True) as llm,
        pytest.raises(UserError, match="text prefix needs a tokenizer"),
    ):
        llm.generate(prompt_token_ids=prompts(), prefix="Once")


TOKEN = st.integers(0, 3)


@given(st.lists(TOKEN, max_size=40), st.lists(TOKEN, max_size=40), st.booleans())
def test_what_is_shared(prefix: list[int], other: list[int], begins: bool) -> None:
    prompt = prefix + other if begins else other
    shared = shared_tokens(prompt, prefix)
    assert shared in ((), (len(prefix) - 1,))
    for length in shared:
        assert length >= MIN_PREFIX_TOKENS
        assert prompt[:length] == prefix[:length]
        assert length < len(prompt)
    if begins and other and not shared:
        assert len(prefix) <= MIN_PREFIX_TOKENS
