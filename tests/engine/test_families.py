"""The contract of every family: what transformers computes, this package computes, wherever the
data lie. `scripts/checks/check_families.py` runs the full product of variants and placements."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.engine import drafting
from flexgen_jax.offload.speculation import Pace
from tests.helpers.cases import covering
from tests.helpers.drafts import Scripted
from tests.helpers.families import NEW_TOKENS, VARIANTS, Reference
from tests.helpers.models import TIER_PLACEMENTS, assert_within_plan, prompts

PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
WAYS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((30, 40, 20, 50, 0, 100), {"attention": "host", "prefill_chunk": 7}),
    ((0, 0, 0, 0, 0, 0), {"attention": "device", "schedule": "zigzag"}),
    *((percent, {}) for percent in TIER_PLACEMENTS),
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Reference]:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda family, n: Reference(root / f"{family}-{n}", family, n))


@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("variant", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_logits_are_those_of_transformers(
    references: Callable[[str, int], Reference], family: str, variant: int
) -> None:
    """Log-probabilities are the logits minus one constant per row."""
    reference = references(family, variant)
    with LLM(reference.folder, dtype="float32", policy=Policy(batch_size=8)) as llm:
        scores = llm.score(prompt_token_ids=prompts())
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=2e-5)


@pytest.mark.few(3)
@pytest.mark.parametrize("variant", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "way"), covering([*VARIANTS], [*range(len(WAYS))], together=1))
def test_tokens_are_those_of_transformers(
    references: Callable[[str, int], Reference],
    tmp_path: Path,
    family: str,
    variant: int,
    way: int,
) -> None:
    reference, (percent, how) = references(family, variant), WAYS[way]
    policy = Policy.from_percent(*percent, batch_size=4, num_batches=2, kv_block_tokens=4, **how)
    with LLM(
        reference.folder, policy=policy, dtype="float32", offload_dir=tmp_path, unified=way % 3 > 0
    ) as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=PARAMS)
        report = llm.report()
    assert [result.token_ids for result in results] == reference.tokens
    assert_within_plan(report)


@pytest.mark.few(3)
@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("family", VARIANTS)
def test_every_family_runs_in_16_bits(
    references: Callable[[str, int], Reference], family: str, variant: int
) -> None:
    """XLA's CPU backend takes products of bfloat16 in some orders of axes only."""
    policy = Policy(batch_size=4, num_batches=2, kv_block_tokens=8)
    with LLM(references(family, variant).folder, dtype="bfloat16", policy=policy) as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=PARAMS)
        scores = llm.score(prompt_token_ids=prompts())
    assert all(len(result.token_ids) == NEW_TOKENS for result in results)
    assert all(np.isfinite(score.logprobs).all() for score in scores)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", VARIANTS)
def test_guessed_tokens_change_none(
    references: Callable[[str, int], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    """Also of layers with a state, which goes on from one that has seen no guess."""
    reference = references(family, 0)
    texts = [[*p, *ids] for p, ids in zip(prompts(), reference.tokens, strict=True)]
    monkeypatch.setattr(drafting, "LookupDrafter", lambda: Scripted(texts, wrong=5))
    monkeypatch.setattr(drafting, "cache_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(Pace, "count", lambda pace: pace.most)
    policy = Policy.from_percent(
        *(30, 40, 20, 50, 0, 100), batch_size=3, num_batches=2, kv_block_tokens=4
    )
    with LLM(
        reference.folder, policy=policy, dtype="float32", offload_dir=tmp_path, draft="lookup"
    ) as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=PARAMS)
        report = llm.report()
    assert [result.token_ids for result in results] == reference.tokens
    assert_within_plan(report)
    assert report["tokens_a_pass"] > 2


def test_longrope_has_frequencies_for_long_sequences(tmp_path: Path) -> None:
    """A text of more tokens than in training is scored with other frequencies than a short one."""
    reference = Reference(tmp_path, "phi3", 0)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 96, count).tolist() for count in (60, 20, 45)]
    with LLM(tmp_path, dtype="float32", policy=Policy(batch_size=2)) as llm:
        scores = llm.score(prompt_token_ids=texts)
    for ids, score in zip(texts, scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["qwen2_moe", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama", "gemma3_text"))],
)
@pytest.mark.parametrize("bits", [4])
def test_packed_weights_and_caches_give_equal_tokens_everywhere(
    references: Callable[[str, int], Reference], tmp_path: Path, family: str, bits: int
) -> None:
    found = []
    for percent, how in WAYS:
        policy = Policy.from_percent(
            *percent,
            batch_size=4,
            num_batches=2,
            kv_block_tokens=4,
            weight_bits=bits,
            cache_bits=bits,
            **how | {"prefill_chunk": 2048},
        )
        folder = references(family, 0).folder
        with LLM(folder, policy=policy, dtype="float32", offload_dir=tmp_path) as llm:
            results = llm.generate(prompt_token_ids=prompts(), sampling_params=PARAMS)
        found.append([result.token_ids for result in results])
    assert found[0] == found[1]
    assert len({tuple(ids) for ids in found[0]}) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("sharing_pays")
@pytest.mark.parametrize(
    ("family", "chunk"),
    [
        ("gpt_oss", 16),
        ("qwen3_5", 2048),
        ("gemma3_text", 2048),
        ("mistral", 7),
        ("deepseek_v3", 16),
        ("gemma4", 16),
    ],
)
def test_what_prompts_share_changes_nothing(
    references: Callable[[str, int], Reference], family: str, chunk: int
) -> None:
    """Sinks, windows, compressed caches and states, of two documents after one instruction."""
    reference, rng = references(family, 0), np.random.default_rng(3)
    first, *documents = (rng.integers(3, 96, count).tolist() for count in (20, 22, 27))
    ends = [rng.integers(3, 96, 3 + n).tolist() for n in range(8)]
    asked = [[*first, *documents[n % 2], *end] for n, end in enumerate(ends)]
    found, computed = [], []
    for shares in (True, False):
        policy = Policy(batch_size=3, num_batches=2, kv_block_tokens=4, prefill_chunk=chunk)
        options = {"policy": policy, "prefix_sharing": shares}
        with LLM(reference.folder, dtype="float32", **options) as llm:
            results = llm.generate(prompt_token_ids=asked, sampling_params=PARAMS)
            computed.append(llm.report()["prompt_tokens"])
        found.append([result.token_ids for result in results])
    assert found[0] == found[1]
    assert computed == [20 + 22 + 27 + sum(map(len, ends)), sum(map(len, asked))]


@pytest.mark.parametrize("family", ["gpt_oss", "smollm3"])
def test_prefixes_chunks_and_branches_change_nothing(
    references: Callable[[str, int], Reference], family: str
) -> None:
    """Sinks take part once for each token, whatever its keys come from; layers without positions
    have none in any of them."""
    reference, beginning = references(family, 0), [7, 9, 11, 13, 15, 17, 19, 21, 23]
    ends = [[*beginning, *ids[:20]] for ids in prompts()[:4]]
    policy = Policy(batch_size=2, num_batches=2, prefill_chunk=6, kv_block_tokens=4)
    contexts = [[*beginning, 30]] * 3
    options = {"policy": policy, "prefix_sharing": False}
    with LLM(reference.folder, dtype="float32", **options) as llm:
        alone, shared = (
            llm.generate(prompt_token_ids=ends, sampling_params=PARAMS, prefix=prefix)
            for prefix in (None, beginning)
        )
        pairs = llm.score_pairs(contexts, [[40], [41, 42], [43, 44, 45]])
    assert [x.token_ids for x in shared] == [x.token_ids for x in alone]
    for continuation, pair in zip(([40], [41, 42], [43, 44, 45]), pairs, strict=True):
        wanted = reference.logprobs([*contexts[0], *continuation])[-len(continuation) :].sum()
        assert sum(pair.logprobs) == pytest.approx(wanted, rel=1e-4)
