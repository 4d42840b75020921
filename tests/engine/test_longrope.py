"""longrope: frequencies follow from the length so far, as in transformers, so that a text does not
depend on how long it may get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.requests.requests import EncodedRequest, divided

BORDER = 24
LENGTHS = (20, 24, 25, 10)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.helpers.families import LONGROPE, Reference

    rope = LONGROPE["rope_parameters"] | {"original_max_position_embeddings": BORDER}
    return Reference(
        tmp_path_factory.mktemp("phi3"),
        "phi3",
        0,
        original_max_position_embeddings=BORDER,
        rope_parameters=rope,
    )


def rows() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(3, 90, n).tolist() for n in LENGTHS]


def test_texts_across_the_border_are_those_of_transformers(reference: Any) -> None:
    import torch

    reference.model.generation_config.eos_token_id = None
    expected = []
    for ids in rows():
        row = torch.tensor([ids])
        made = reference.model.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=20,
            do_sample=False,
            pad_token_id=1,
        )
        expected.append(made[0, len(ids) :].tolist())
    policy = Policy(batch_size=3, num_batches=2)
    with LLM(reference.folder, dtype="float32", policy=policy) as llm:
        for most in (20, 9):
            params = SamplingParams(most, temperature=0, ignore_eos=True, logprobs=1)
            found = llm.generate(prompt_token_ids=rows(), sampling_params=params)
            assert [r.token_ids for r in found] == [row[:most] for row in expected]
            assert all(len(r.logprobs or ()) == most for r in found)


@pytest.mark.slow
def test_draws_stops_and_what_an_earlier_run_made_go_on_across_the_border(reference: Any) -> None:
    with LLM(reference.folder, dtype="float32", policy=Policy(batch_size=3)) as llm:
        drawn = SamplingParams(20, temperature=1.0, seed=4, ignore_eos=True)
        whole = llm.generate(prompt_token_ids=rows(), sampling_params=drawn)
        for row, text in zip(rows(), whole, strict=True):
            (short,) = llm.stream([Request("a", None, row, drawn, place=int(text.id))])
            assert short.token_ids == text.token_ids
            made = text.token_ids[:5]
            request = Request("a", None, row, drawn, continued=made, place=int(text.id))
            (found,) = llm.stream([request])
            assert found.token_ids == text.token_ids
        stop = whole[0].text[8:10]
        ended = SamplingParams(20, temperature=1.0, seed=4, ignore_eos=True, stop=[stop])
        (cut_off,) = llm.generate(prompt_token_ids=rows()[:1], sampling_params=ended)
        assert cut_off.text == whole[0].text[: whole[0].text.index(stop)]


@pytest.mark.parametrize(
    ("prompt", "tokens", "first", "later"),
    [
        (50, 60, 15, 45),
        (50, 15, 15, 0),
        (50, 14, 14, 0),
        (64, 5, 1, 4),
        (65, 5, 5, 0),
        (90, 5, 5, 0),
    ],
)
def test_a_request_is_divided_at_the_border(
    prompt: int, tokens: int, first: int, later: int
) -> None:
    request = EncodedRequest(0, tuple(range(prompt)), SamplingParams(), tokens)
    parts = divided(request, 64)
    assert (parts.max_tokens, parts.later, parts.whole_limit) == (first, later, tokens)
    assert divided(request, None) is request
    if later:
        rest = parts.going_on([7] * first)
        assert (rest.given_ids, rest.made_ids) == (request.prompt_ids, (7,) * first)
        assert (rest.max_tokens, rest.later, rest.whole_limit) == (later, 0, tokens)
