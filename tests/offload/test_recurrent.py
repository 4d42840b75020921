"""Layers with a recurrent state in a model: long prompts, chunks, prefixes, batches that shrink."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.offload.batch import Computed
from flexgen_jax.offload.executor import BlockRun
from flexgen_jax.schedule.backend import Inputs
from flexgen_jax.schedule.waves import Step
from tests.helpers.families import Reference
from tests.helpers.models import assert_within_plan

LENGTHS = (3, 300, 17, 64, 65, 130)
NEW = (9, 2, 5, 1, 3, 9)
"""New tokens of each prompt: four rows of the batch leave before the others."""

DISK = (30, 40, 20, 30, 0, 50)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    return Reference(folder, request.param, 0, max_position_embeddings=512)


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, 96, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(reference: Reference, asked: list[list[int]]) -> list[list[int]]:
    """transformers' greedy tokens."""
    return [reference.greedy(ids, count) for ids, count in zip(asked, NEW, strict=True)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("chunk", "schedule", "percent"),
    [(16, "diagonal", DISK), (64, "zigzag", DISK), (2048, "continuous", (100, 0) * 3)],
)
def test_long_and_short_prompts_give_transformers_tokens(
    reference: Reference,
    asked: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
    chunk: int,
    schedule: str,
    percent: tuple[int, ...],
) -> None:
    policy = Policy.from_percent(
        *percent, batch_size=6, num_batches=1, prefill_chunk=chunk, schedule=schedule
    )
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in NEW]
    with LLM(
        reference.folder, dtype="float32", policy=policy, offload_dir=tmp_path, unified=False
    ) as llm:
        results = llm.generate(prompt_token_ids=asked, sampling_params=params)
        report = llm.report()
    assert [result.token_ids for result in results] == expected
    assert_within_plan(report)


@pytest.mark.slow
@pytest.mark.parametrize("percent", [(100, 0) * 3, DISK])
def test_a_shared_prefix_changes_nothing(
    reference: Reference,
    asked: list[list[int]],
    tmp_path: Path,
    percent: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows go on from the state that the prefix left, whatever padding is before their own
    tokens."""
    of_prefix: list[Step] = []
    compute = BlockRun.compute

    def noting(self: BlockRun, step: Step, inputs: Inputs) -> Computed:
        of_prefix.extend([step] if step.batch.is_prefix else [])
        return compute(self, step, inputs)

    monkeypatch.setattr(BlockRun, "compute", noting)
    beginning = asked[4][:40]
    ends = [[*beginning, *ids[:20]] for ids in asked]
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    policy = Policy.from_percent(*percent, batch_size=3, num_batches=2, prefill_chunk=16)
    options = {"policy": policy, "offload_dir": tmp_path, "prefix_sharing": False}
    with LLM(reference.folder, dtype="float32", **options) as llm:
        alone, shared = (
            llm.generate(prompt_token_ids=ends, sampling_params=params, prefix=prefix)
            for prefix in (None, beginning)
        )
    assert [x.token_ids for x in shared] == [x.token_ids for x in alone]
    assert len(of_prefix) == 3 * 4, "three chunks in the embedding and three layers"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("percent", "chunk", "unified"),
    [((100, 0) * 3, 2048, False), (DISK, 16, True), (DISK, 2048, False)],
)
def test_a_conversation_goes_on_after_a_restart(
    reference: Reference,
    tmp_path: Path,
    loading_pays: None,
    percent: tuple[int, ...],
    chunk: int,
    unified: bool,
) -> None:
    """From the state at the end of the round before; prompts that share a prefix leave one, too."""
    rng = np.random.default_rng(3)
    system = rng.integers(3, 96, 70).tolist()
    policy = Policy.from_percent(*percent, batch_size=3, num_batches=2, prefill_chunk=chunk)
    options = {"policy": policy, "unified": unified, "offload_dir": tmp_path, "dtype": "float32"}
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    asked, computed = [[*system], [*system]], list[int]()
    for _ in range(3):
        asked = [[*ids, *rng.integers(3, 96, 4 + n).tolist()] for n, ids in enumerate(asked)]
        with LLM(reference.folder, kv_store="9MB", kv_store_dir=tmp_path / "kv", **options) as llm:
            results = llm.generate(prompt_token_ids=asked, sampling_params=params)
            report = llm.report()
        assert [x.token_ids for x in results] == [reference.greedy(ids, 6) for ids in asked]
        assert_within_plan(report)
        computed.append(report["prompt_tokens"])
        asked = [[*ids, *result.token_ids] for ids, result in zip(asked, results, strict=True)]
    assert computed == [70 + 4 + 5, 2 * 1 + 4 + 5, 2 * 1 + 4 + 5]


@pytest.mark.slow
def test_a_piece_that_is_gone_is_written_again(
    reference: Reference, tmp_path: Path, loading_pays: None
) -> None:
    """Amid a sequence whose end, with its state, is still there."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    asked = np.random.default_rng(5).integers(3, 96, 150).tolist()
    policy, computed = Policy(batch_size=2), []
    for turn in range(3):
        options = {"kv_store": "9MB", "kv_store_dir": tmp_path, "policy": policy}
        with LLM(reference.folder, dtype="float32", **options) as llm:
            ids = [*asked, *reference.greedy(asked, 6), 5] if turn == 2 else asked
            (result,) = llm.generate(prompt_token_ids=[ids], sampling_params=params)
            computed.append(llm.report()["prompt_tokens"])
        assert result.token_ids == reference.greedy(ids, 6)
        if turn == 0:
            max(tmp_path.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns).unlink()
    assert computed == [150, 150, 2], "the last token of the text, and the new one"


@pytest.mark.few(1)
def test_continuations_are_scored(reference: Reference, asked: list[list[int]]) -> None:
    context, ends = asked[4][:40], ([40], [41, 42], [43, 44, 45])
    with LLM(reference.folder, dtype="float32", policy=Policy(batch_size=3)) as llm:
        pairs = llm.score_pairs([context] * 3, ends)
    for continuation, pair in zip(ends, pairs, strict=True):
        wanted = reference.logprobs([*context, *continuation])[-len(continuation) :]
        np.testing.assert_allclose(pair.logprobs, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_stages_give_transformers_tokens(
    reference: Reference, asked: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    """Each has its own layers' states."""
    policy = Policy.from_percent(*DISK, batch_size=3, num_batches=2, prefill_chunk=64)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in NEW]
    options = {"policy": policy, "offload_dir": tmp_path, "stages": 2}
    with LLM(reference.folder, dtype="float32", **options) as llm:
        results = llm.generate(prompt_token_ids=asked, sampling_params=params)
    assert [result.token_ids for result in results] == expected
