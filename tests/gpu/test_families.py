"""Whole models with the GPU's kernels, which JAX interprets without one, beside XLA's own code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexgen_jax import LLM, Policy, RequestOutput, SamplingParams
from flexgen_jax.gpu import DeviceKernels, GpuKernels
from flexgen_jax.policy.hardware import KernelSizes
from tests.helpers.as_on_gpu import has_gpu
from tests.helpers.families import VARIANTS, Reference
from tests.helpers.models import prompts

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
XLA = DeviceKernels(KernelSizes.of_gpu())
TRITON = GpuKernels(KernelSizes.of_gpu(), interprets=not has_gpu())
TOLERANCE = 0.03
"""Of log-probabilities: logits of about 4 to 10 that float16 rounds in every layer."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda family: Reference(root / family, family, 0).folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tokens_are_those_of_xla(
    references: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    family: str,
    bits: int,
) -> None:
    """Equal in fp32; in float16 two tokens may be as likely as each other, from where on texts
    differ. bits: of the weights and of the cache."""
    policy = Policy(
        batch_size=4, num_batches=2, kv_block_tokens=8, weight_bits=bits, cache_bits=bits
    )

    def generated(kernels: DeviceKernels) -> list[RequestOutput]:
        monkeypatch.setattr("flexgen_jax.offload.device.kernels_of_device", lambda: kernels)
        with LLM(references(family), policy=policy, dtype=dtype, unified=False) as llm:
            return llm.generate(prompt_token_ids=prompts(), sampling_params=PARAMS)

    for one, other in zip(generated(XLA), generated(TRITON), strict=True):
        if dtype == "float32":
            assert one.token_ids == other.token_ids
            continue
        assert one.logprobs is not None and other.logprobs is not None
        for a, b, x, y in zip(
            one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True
        ):
            assert abs(x.logprob - y.logprob) < TOLERANCE
            if a != b:
                break
