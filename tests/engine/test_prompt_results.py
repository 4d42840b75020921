"""Results that belong to prompts: their vectors, and the log-probabilities of their tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, Request, SamplingParams, UserError
from flexgen_jax.models.pooling import read_pooling
from flexgen_jax.policy.policy import Placement
from tests.helpers.families import Reference

ROWS = [[5, 6, 7, 8, 9], [10, 11, 12], [40, 41] * 17, [30, 31, 32]]
POLICIES = {
    "resident": Policy(batch_size=4),
    "chunks": Policy(batch_size=2, num_batches=2, prefill_chunk=16),
    "disk": Policy(
        batch_size=2,
        weights=Placement(0.3, 0.3),
        cache=Placement(0, 0.5),
        activations=Placement(0, 0),
        kv_block_tokens=4,
    ),
    "drafts": Policy(batch_size=4, draft_tokens=2),
    "4-bit cache": Policy(batch_size=3, cache_bits=4),
}


def pooled(states: np.ndarray, mode: str) -> np.ndarray:
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[mode]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("name", ["resident", "chunks", "disk"])
def test_vectors_are_those_of_transformers(tmp_path: Path, family: str, name: str) -> None:
    """Without a head, as sentence-transformers has them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = Reference(tmp_path, family, 0, tie_word_embeddings=True).model.model
    model.save_pretrained(tmp_path)
    states = [
        model(torch.tensor([row])).last_hidden_state[0].detach().numpy()  # one text at a time
        for row in ROWS
    ]
    with LLM(tmp_path, dtype="float32", policy=POLICIES[name]) as llm:
        for mode in ("last", "mean", "cls"):
            expected = np.stack([pooled(x, mode) for x in states])
            found = llm.embed(prompt_token_ids=ROWS, pooling=mode, normalize=False)
            np.testing.assert_allclose(found, expected, atol=2e-5)
        units = llm.embed(prompt_token_ids=ROWS, dimensions=8)
    of_last = np.stack([x[-1, :8] for x in states])
    of_last /= np.linalg.norm(of_last, axis=1, keepdims=True)
    np.testing.assert_allclose(units, of_last, atol=2e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_logprobs_of_prompts_are_their_scores(
    checkpoint: Callable[[], Path], tmp_path: Path, name: str
) -> None:
    """Texts that ask for them go beside others, whose tokens stay the same."""
    plain = SamplingParams(max_tokens=6, temperature=0)
    asking = SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=3, logprobs=1)
    policy = POLICIES[name]
    with LLM(checkpoint(), dtype="float32", policy=policy, offload_dir=tmp_path) as llm:
        scores = llm.score(prompt_token_ids=ROWS)
        expected = llm.generate(prompt_token_ids=ROWS, sampling_params=plain)
        found = llm.generate(prompt_token_ids=ROWS, sampling_params=[asking, plain] * 2)
    for number, (result, score) in enumerate(zip(found, scores, strict=True)):
        if policy.cache_bits == 16:
            assert result.token_ids == expected[number].token_ids
        if number % 2:
            assert result.prompt_logprobs is None
            continue
        first, *others = result.prompt_logprobs or [None]
        assert first is None
        np.testing.assert_allclose([x.logprob for x in others if x], score.logprobs, atol=2e-5)
        for token, logs, greedy in zip(ROWS[number][1:], others, score.greedy, strict=True):
            assert logs is not None
            assert len(logs.top) == 3
            assert (logs.top[0][0] == token) == greedy
            assert logs.top[0][1] >= logs.logprob - 1e-6
        assert len(result.logprobs or ()) == len(result.token_ids)


def test_a_stream_plans_for_prompts_that_are_read(checkpoint: Callable[[], Path]) -> None:
    """The first plan has room for plain texts alone."""
    asking = SamplingParams(max_tokens=2, prompt_logprobs=0)
    requests = [Request(str(n), prompt_token_ids=ROWS[n % 4]) for n in range(40)]
    requests += [Request("read", prompt_token_ids=ROWS[2], sampling_params=asking)]
    requests += [Request("vector", prompt_token_ids=ROWS[1], pooling="mean")]
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=4, num_batches=2)) as llm:
        results = {result.id: result for result in llm.stream(iter(requests))}
        (score,) = llm.score(prompt_token_ids=[ROWS[2]])
        expected = llm.embed(prompt_token_ids=[ROWS[1]], pooling="mean", normalize=False)
    assert len(results) == len(requests)
    assert all(result.error is None for result in results.values())
    found = [x.logprob for x in results["read"].prompt_logprobs or () if x is not None]
    np.testing.assert_allclose(found, score.logprobs, atol=2e-5)
    np.testing.assert_allclose(results["vector"].embedding, expected[0], atol=2e-5)


def test_shared_tokens_of_a_prompt_count_as_cached(checkpoint: Callable[[], Path]) -> None:
    prefix = [20, 21] * 12
    rows = [[*prefix, *row] for row in ROWS[:2]]
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=4)) as llm:
        shared = llm.generate(prompt_token_ids=rows, prefix=prefix)
        alone = llm.generate(prompt_token_ids=rows[:1])
    assert [result.cached_tokens for result in shared] == [len(prefix) - 1] * 2
    assert alone[0].cached_tokens == 0


def write_modules(folder: Path, mode: dict[str, Any], kinds: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    modules = [
        {"idx": n, "path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))


THREE = ("Transformer", "Pooling", "Normalize")


@pytest.mark.parametrize(
    ("mode", "kinds", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, THREE, ("last", True)),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
            THREE[:2],
            ("mean", False),
        ),
        ({"pooling_mode_cls_token": True}, THREE, ("cls", True)),
        ({"pooling_mode": "mean"}, THREE, ("mean", True)),
        ({"pooling_mode_max_tokens": True}, THREE, "pooling by max_tokens is not supported"),
        ({"pooling_mode": "cls+mean"}, THREE, "pooling by cls+mean is not supported"),
        ({"pooling_mode": "mean"}, (*THREE[:2], "Dense"), "Dense is not supported"),
    ],
)
def test_folders_of_sentence_transformers(
    tmp_path: Path, mode: dict[str, Any], kinds: tuple[str, ...], expected: Any
) -> None:
    write_modules(tmp_path, mode, kinds)
    found = read_pooling(tmp_path)
    if isinstance(expected, str):
        assert expected in (found.problem or "")
    else:
        assert (found.pooling, found.normalizes, found.problem) == (*expected, None)


def test_a_model_in_0_transformer(tmp_path: Path, checkpoint: Callable[[], Path]) -> None:
    """Older exports have the weights in a sub-folder."""
    write_modules(tmp_path, {"pooling_mode": "mean"}, ("Transformer", "Pooling"))
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    shutil.copytree(checkpoint(), tmp_path / "0_Transformer")
    with LLM(tmp_path, dtype="float32", policy=Policy(batch_size=4)) as llm:
        found = llm.embed(prompt_token_ids=ROWS)
        expected = llm.embed(prompt_token_ids=ROWS, pooling="mean", normalize=False)
    np.testing.assert_array_equal(found, expected)


def test_impossible_vectors_are_refused(checkpoint: Callable[[], Path]) -> None:
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=4)) as llm:
        with pytest.raises(UserError, match="pooling must be one of"):
            llm.embed(prompt_token_ids=ROWS, pooling="max")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="dimensions must be from 1 to"):
            llm.embed(prompt_token_ids=ROWS, dimensions=10_000)
        with pytest.raises(UserError, match="prompt 1 has 0 tokens"):
            llm.embed(prompt_token_ids=[[5], []])
