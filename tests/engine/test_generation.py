"""Tests that every placement, schedule and look-ahead gives the tokens of a NumPy OPT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flexgen_jax import LLM, Policy, Report, SamplingParams, UserError
from flexgen_jax.offload.end_steps import NonFiniteError
from flexgen_jax.requests.stop_strings import may_end
from tests.helpers.models import (
    VARIANTS,
    prompts,
    write_checkpoint,
)
from tests.helpers.numpy_opt import reference

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="session")
def expected(checkpoint: Callable[[str], Path]) -> list[list[int]]:
    model = reference(checkpoint())
    return [model.greedy(ids, 32) for ids in prompts()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_of_variants(checkpoint: Callable[[str], Path], variant: str) -> None:
    folder = checkpoint(variant)
    model = reference(folder)
    with LLM(folder, dtype="float32", policy=Policy(batch_size=8)) as llm:
        scores = llm.score(prompt_token_ids=prompts())
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, model.logprobs(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "variant", ["350m", *(pytest.param(x, marks=pytest.mark.slow) for x in VARIANTS if x != "350m")]
)
def test_tokens_of_variants(checkpoint: Callable[[str], Path], variant: str) -> None:
    folder = checkpoint(variant)
    model = reference(folder)
    with LLM(folder, dtype="float32", policy=Policy(batch_size=8)) as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=GREEDY)
    assert [result.token_ids for result in results] == [model.greedy(ids, 32) for ids in prompts()]


@pytest.mark.parametrize(("dtype", "close"), [("bfloat16", 0.015), ("float16", 0.002)])
def test_narrow_dtypes_stay_close(
    checkpoint: Callable[[str], Path], dtype: str, close: float
) -> None:
    """Weights and hidden states alone are narrow: 0.011 and 0.0013 off, in the mean square."""
    model = reference(checkpoint())
    with LLM(checkpoint(), dtype=dtype) as llm:
        scores = llm.score(prompt_token_ids=prompts())
    ours = np.concatenate([score.logprobs for score in scores])
    off = ours - np.concatenate([model.logprobs(ids) for ids in prompts()])
    assert np.sqrt(np.mean(off**2)) < close
    assert np.abs(off).max() < 4 * close


def test_end_token_stop_strings_and_length(
    checkpoint: Callable[[str], Path], expected: list[list[int]]
) -> None:
    ids, tokens = prompts()[0], expected[0]
    folder = checkpoint()
    with LLM(folder, dtype="float32") as llm:
        text = llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY)[0].text
        stop = text[5:7]
        found = llm.generate(
            prompt_token_ids=[ids],
            sampling_params=SamplingParams(max_tokens=32, stop=[stop], ignore_eos=True),
        )[0]
        assert found.finish_reason == "stop"
        assert found.text == text[: text.index(stop)]
        short = llm.generate(
            prompt_token_ids=[ids], sampling_params=SamplingParams(max_tokens=4, ignore_eos=True)
        )[0]
        assert (short.token_ids, short.finish_reason) == (tokens[:4], "length")


def test_end_token(tmp_path: Path, expected: list[list[int]]) -> None:
    """The seventh token of the first prompt's text is made the end token."""
    end = expected[0][6]
    first = expected[0].index(end)
    with LLM(write_checkpoint(tmp_path / "m", eos_token_id=end), dtype="float32") as llm:
        found = llm.generate(
            prompt_token_ids=prompts(), sampling_params=SamplingParams(max_tokens=32)
        )
    assert found[0].token_ids == expected[0][: first + 1]
    assert found[0].finish_reason == "stop"
    for result, tokens in zip(found, expected, strict=True):
        kept = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert result.token_ids == kept


def test_sampling_does_not_depend_on_the_batch(checkpoint: Callable[[str], Path]) -> None:
    choice = SamplingParams(max_tokens=12, temperature=1.0, top_k=20, top_p=0.9, ignore_eos=True)
    found = []
    for rows, batches in ((8, 1), (2, 4), (1, 3)):
        policy = Policy(batch_size=rows, num_batches=batches)
        with LLM(checkpoint(), dtype="float32", policy=policy) as llm:
            results = llm.generate(prompt_token_ids=prompts(), sampling_params=choice)
        found.append([result.token_ids for result in results])
    assert found[0] == found[1] == found[2]


def test_mixed_parameters_keep_their_own(
    checkpoint: Callable[[str], Path], expected: list[list[int]]
) -> None:
    choices = [
        SamplingParams(max_tokens=3 + i, temperature=i % 2, seed=i, ignore_eos=True)
        for i in range(len(prompts()))
    ]
    with LLM(checkpoint(), dtype="float32") as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=choices)
    for i, result in enumerate(results):
        assert len(result.token_ids) == 3 + i
        if i % 2 == 0:
            assert result.token_ids == expected[i][: 3 + i]


def test_one_engine_runs_again_and_again(
    checkpoint: Callable[[str], Path], expected: list[list[int]], tmp_path: Path
) -> None:
    policy = Policy.from_percent(0, 0, 0, 0, 0, 0, batch_size=3, num_batches=2)
    with LLM(checkpoint(), dtype="float32", policy=policy, offload_dir=tmp_path) as llm:
        for count in (8, 1, 3):
            results = llm.generate(prompt_token_ids=prompts()[:count], sampling_params=GREEDY)
            assert [result.token_ids for result in results] == expected[:count]


def test_context_limits_the_tokens(checkpoint: Callable[[str], Path]) -> None:
    with LLM(checkpoint(), dtype="float32") as llm:
        ids = [list(range(3, 93))]
        found = llm.generate(
            prompt_token_ids=ids, sampling_params=SamplingParams(max_tokens=50, ignore_eos=True)
        )[0]
        assert len(found.token_ids) == 96 - 90
        with pytest.raises(UserError, match="prompt 0 has 96 tokens"):
            llm.generate(prompt_token_ids=[[5] * 96])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompts": []}, "empty"),
        ({"prompt_token_ids": [[]]}, "0 tokens"),
        ({"prompt_token_ids": [[96]]}, "vocabulary"),
        ({}, "either"),
        ({"prompt_token_ids": [[5]], "sampling_params": []}, "1 prompts"),
    ],
)
def test_bad_requests(
    checkpoint: Callable[[str], Path], arguments: dict[str, object], said: str
) -> None:
    with LLM(checkpoint()) as llm, pytest.raises(UserError, match=said):
        llm.generate(**arguments)


def test_nan_names_the_layer(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = write_checkpoint(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.decoder.layers.1.fc1.weight"][0, 0] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with LLM(folder) as llm, pytest.raises(NonFiniteError, match="decoder layer 1"):
        llm.generate(prompt_token_ids=[[5, 6]])


def test_a_report_has_the_fields_that_its_type_says(checkpoint: Callable[[], Path]) -> None:
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=2)) as llm:
        llm.generate(prompt_token_ids=[[5, 6]], sampling_params=SamplingParams(max_tokens=2))
        assert {*llm.report()} == {*Report.__annotations__} - {"stages"}


@pytest.mark.parametrize(
    ("stop", "piece", "expected"),
    [
        (b"one.", b" one. And", True),
        (b"one.", b"e.", True),
        (b"one.", b".", True),
        (b"one.", b"on", False),
        (b"one.", b" then", False),
        (b"can't", b" n't", True),
        ("\u20ac".encode(), b"\xac", True),
    ],
)
def test_which_tokens_may_end_a_text(stop: bytes, piece: bytes, expected: bool) -> None:
    assert may_end(stop, piece) is expected
