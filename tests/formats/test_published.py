"""Models in the formats in which hubs have them: what transformers computes with the weights that
they stand for, this package computes with the files as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexgen_jax import LLM, Policy
from tests.helpers.cases import covering
from tests.helpers.models import prompts
from tests.helpers.published import FORMATS, write_published

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TIERS = ((100, 0, 100, 0, 100, 0), (30, 40, 20, 50, 0, 100), (0, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("kind", "family", "percent"),
    covering([*FORMATS], ["llama", "qwen3", "mixtral"], TIERS, together=1),
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, kind: str, family: str, percent: tuple[int, ...]
) -> None:
    if kind.startswith("nf4"):
        pytest.importorskip("bitsandbytes")
    reference = write_published(tmp_path / "model", family, kind)
    policy = Policy.from_percent(*percent, batch_size=4, num_batches=2)
    folder = tmp_path / "offload"
    with LLM(reference.folder, dtype="float32", policy=policy, offload_dir=folder) as llm:
        scores = llm.score(prompt_token_ids=prompts())
        report = llm.report()
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=1e-4)
    for tier, peak in report["peak_bytes"].items():
        assert peak <= report["computed_peak_bytes"][tier], tier
