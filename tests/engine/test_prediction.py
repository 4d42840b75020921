"""Predictions of runs whose texts differ in length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flexgen_jax.engine.prediction import predicted_time
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.offload.batch import HeadResult
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.requests.generation import Generation
from flexgen_jax.requests.requests import EncodedRequest
from flexgen_jax.requests.sampling import SamplingParams
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Problem
from flexgen_jax.search.search import evaluate
from tests.helpers.profiles import machine

COUNT, PROMPT, MOST = 32, 64, 40


def problem(policy: Policy) -> Problem:
    workload = Workload(PROMPT, MOST, COUNT)
    config = known_shape("facebook/opt-125m")
    setting = Setting(config, "float16", unified=False)
    return Problem(setting, machine(), Budgets(), workload, policy)


def seconds(policy: Policy, ends: Sequence[int]) -> float:
    params = SamplingParams(MOST)
    texts = {
        EncodedRequest(index, (5,) * PROMPT, params, MOST): tokens
        for index, tokens in enumerate(ends)
    }
    found = predicted_time(problem(policy), policy, texts)
    assert found is not None
    return found.total_s


@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (0, 50, 0, 50, 0, 100)])
@pytest.mark.parametrize("schedule", ["zigzag", "continuous", "row"])
def test_equal_texts_take_what_a_block_takes(percent: tuple[int, ...], schedule: str) -> None:
    policy = Policy.from_percent(*percent, batch_size=8, num_batches=2, schedule=schedule)
    expected = evaluate(problem(policy), policy).total_s
    assert seconds(policy, [MOST] * COUNT) == pytest.approx(expected, rel=0.05)


def test_texts_that_end_early_cost_less() -> None:
    """If others may enter; the weights, which move for each wave, are what takes the time here."""
    ends = [MOST if index % 8 == 0 else MOST // 8 for index in range(COUNT)]
    policies = {
        name: Policy.from_percent(
            0, 100, 100, 0, 100, 0, batch_size=4, num_batches=2, schedule=name
        )
        for name in ("continuous", "zigzag")
    }
    whole = seconds(policies["zigzag"], [MOST] * COUNT)
    found = {name: seconds(policy, ends) for name, policy in policies.items()}
    assert found["continuous"] < 0.8 * found["zigzag"]
    assert found["zigzag"] < 1.02 * whole, "each block waits for its longest text"


def test_a_long_run_is_not_simulated() -> None:
    policy = Policy(batch_size=1)
    texts = {EncodedRequest(index, (5,), SamplingParams(1000), 1000): 1000 for index in range(100)}
    assert predicted_time(problem(policy), policy, texts) is None


def test_what_is_left_is_expected_from_what_is_finished() -> None:
    """The limit counts until some texts are finished, then their mean."""
    generation = Generation(None, (2,), lambda request, output: None)
    requests = [EncodedRequest(i, (5,), SamplingParams(100), 100, id=str(i)) for i in range(12)]
    generation.begin(requests)
    assert generation.progress() == (0, 1200, 0)
    for token in range(10):
        ids = [[2 if token == 9 and row < 8 else 7] for row in range(12)]
        generation.receive(requests, token, HeadResult(np.array(ids)))
    # Eight texts of 10 tokens; of the other four, 10 of 13 are made.
    assert generation.progress() == (120, 120 + 4 * 3, 8)
