"""Penalties, biases, min-p and log-probabilities, against transformers and their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from flexgen_jax import LLM, Request, SamplingParams
from flexgen_jax.layers.sampling import adjust, keep_top, log_probabilities, only_allowed
from flexgen_jax.requests.sampling import adjusting_arrays, sampling_arrays
from tests.helpers.arrays import anew
from tests.helpers.cases import examples

VOCABULARY = 50
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
EOS = (2, 7)


def logits(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCABULARY)).astype(np.float32)


def adjusted(found: np.ndarray, *rows: tuple[SamplingParams, list[int], list[int]]) -> np.ndarray:
    """What `adjust` makes of logits for some parameters, prompts and texts."""
    arrays = adjusting_arrays([params.adjustments(p, made, EOS) for params, p, made in rows])
    return np.asarray(anew(adjust)(found, *arrays))


@examples(8)
@given(TOKENS, st.lists(st.integers(0, VOCABULARY - 1), max_size=20), st.integers(0, 9))
def test_penalties_are_those_of_transformers(prompt: list[int], made: list[int], seed: int) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    found = logits(2, seed)
    params = SamplingParams(
        repetition_penalty=1.3, logit_bias={3: -2.5, 11: 4.0}, min_tokens=len(made) + 1
    )
    plain = SamplingParams()
    ours = adjusted(found, (params, prompt, made), (plain, prompt, made))
    theirs = torch.tensor(found[:1])
    ids = torch.tensor([[*prompt, *made]])
    for processor in (
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.SequenceBiasLogitsProcessor({(3,): -2.5, (11,): 4.0}),
        transformers.MinNewTokensLengthLogitsProcessor(
            len(prompt), len(made) + 1, [*EOS], device="cpu"
        ),
    ):
        theirs = processor(ids, theirs)
    np.testing.assert_allclose(ours[:1], theirs.numpy(), atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(ours[1], found[1])


@examples(8)
@given(TOKENS, TOKENS, st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 9))
def test_presence_and_frequency_are_the_formula(
    prompt: list[int], made: list[int], presence: float, frequency: float, seed: int
) -> None:
    found = logits(1, seed)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    counts = np.bincount(made, minlength=VOCABULARY)
    expected = found - presence * (counts > 0) - frequency * counts
    np.testing.assert_allclose(adjusted(found, (params, prompt, made)), expected, atol=1e-5)


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
def test_min_p_is_that_of_transformers(min_p: float) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    found = logits(8, 3)
    ids, expected = torch.zeros((8, 1), dtype=torch.int64), torch.tensor(found)
    for warper in (
        transformers.TopKLogitsWarper(30),
        transformers.TopPLogitsWarper(0.95),
        transformers.MinPLogitsWarper(min_p),
    ):
        expected = warper(ids, expected)
    rows = np.ones(8, np.float32)
    ours = keep_top(found, np.full(8, 30, np.int32), 0.95 * rows, min_p * rows)
    np.testing.assert_allclose(np.asarray(ours), expected.numpy(), atol=1e-5)


def test_log_probabilities_are_the_formula() -> None:
    found, ids = logits(5, 1), np.arange(5, dtype=np.int32)
    expected = log_softmax(found.astype(np.float64), axis=1)
    chosen, top_ids, top = map(np.asarray, log_probabilities(found, ids, 4))
    np.testing.assert_allclose(chosen, expected[ids, ids], atol=1e-5)
    order = np.argsort(-expected, axis=1)[:, :4]
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, 1), atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5},
        {"min_tokens": -1},
        {"presence_penalty": 3},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0},
        {"logprobs": 21},
        {"logprobs": True},
        {"logit_bias": {5: 101}},
        {"logit_bias": {-5: 1}},
        {"seed": 1.5},
        {"temperature": "1"},
    ],
)
def test_wrong_values_name_the_parameter(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)  # type: ignore[arg-type]


MIXED = [
    SamplingParams(12, temperature=0, ignore_eos=True),
    SamplingParams(12, temperature=0, repetition_penalty=1.5, ignore_eos=True),
    SamplingParams(12, temperature=0.9, min_p=0.05, seed=3, logprobs=2, ignore_eos=True),
    SamplingParams(12, temperature=0, presence_penalty=1.5, frequency_penalty=0.5, logprobs=5),
    SamplingParams(12, temperature=0.7, top_k=50, logit_bias={100: 5, 2: -100}, seed=9),
    SamplingParams(12, temperature=0, min_tokens=6),
]


def test_requests_that_differ_in_all_of_them_run_together() -> None:
    """Each text is that of the request alone, with the same log-probabilities as scoring gives."""
    texts = ["The people of", "It is", "In the year", "The public debt", "Of all", "We have"]
    with LLM(dtype="float32") as llm:
        together = llm.generate(texts, MIXED)
        for index, (text, params) in enumerate(zip(texts, MIXED, strict=True)):
            (alone,) = llm.stream([Request("alone", text, sampling_params=params, place=index)])
            assert alone.token_ids == together[index].token_ids
            found = together[index].logprobs
            assert (found is None) == (params.logprobs is None)
            if found is not None:
                ids = [*alone.prompt_token_ids, *alone.token_ids]
                (scored,) = llm.score(prompt_token_ids=[ids])
                expected = scored.logprobs[len(alone.prompt_token_ids) - 1 :]
                assert [x.logprob for x in found] == pytest.approx(expected, abs=1e-4)
                assert all(len(x.top) == params.logprobs for x in found)
            assert text in (alone.prompt or "")


@given(st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY))
def test_only_allowed_tokens_keep_their_logits(allowed: list[bool]) -> None:
    found = logits(2, 0)
    bits = np.packbits([*allowed, *[True] * 14], bitorder="little").view(np.uint32)
    masked = np.asarray(anew(only_allowed)(found, np.stack([bits, ~np.zeros(2, np.uint32)])))
    np.testing.assert_array_equal(masked[0], np.where(allowed, found[0], -np.inf))
    np.testing.assert_array_equal(masked[1], found[1])


def test_a_parameter_that_is_not_set_excludes_no_token() -> None:
    """For `sample`: top_k 0, top_p 1 and min_p 0."""
    plain, chosen = (
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1),
    )
    temperature, top_k, top_p, min_p, _, _ = sampling_arrays([plain, chosen], [0, 1], [0, 0])
    np.testing.assert_allclose(temperature, [0.7, 0.5])
    assert top_k.tolist() == [0, 3]
    np.testing.assert_allclose(top_p, [1, 0.9])
    np.testing.assert_allclose(min_p, [0, 0.1])


@pytest.mark.parametrize("top_p", [0, 1.01, 2, "a", True])
def test_top_p_is_a_share(top_p: object) -> None:
    with pytest.raises(ValueError, match="top_p must be"):
        SamplingParams(top_p=top_p)  # type: ignore[arg-type]
