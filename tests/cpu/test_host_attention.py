"""Tests attention on the CPU over a cache on the host, against NumPy and inside whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.cpu.host_attention import HostAttention, HostBlock
from flexgen_jax.cpu.jit.cache_format import CacheFormat
from flexgen_jax.cpu.jit.decode_attention import fold_kernel
from flexgen_jax.layers.attention import attend_blocks, attend_itself, merge
from flexgen_jax.models.parts import AttentionSpec
from tests.helpers.attention import (
    FORMATS,
    LENGTHS,
    POSITION,
    SPECS,
    numpy_attention,
    random_blocks,
)
from tests.helpers.cases import covering
from tests.helpers.models import SHORT, write_checkpoint


@pytest.mark.parametrize(
    ("kind", "head_dim", "variant"),
    covering(FORMATS, [8, 20, 64, 80, 128], list(SPECS), together=1),
)
def test_attention_is_the_formula(
    host: HostAttention, kind: tuple[str, int], head_dim: int, variant: str
) -> None:
    """There are three blocks, one of them the open tail, with left padding that reaches into the
    second; one sequence has a single valid token."""
    dtype, bits = kind
    pairs, (key, value) = random_blocks(head_dim, dtype, bits, bits, head_dim)
    blocks = [HostBlock(start, pair) for start, pair in zip((0, 7, 12), pairs, strict=True)]
    rng = np.random.default_rng(0)
    spec = SPECS[variant]
    query = rng.normal(size=(4, spec.num_heads, 1, head_dim)).astype(np.float32) * head_dim**-0.5
    first = np.array([0, 3, 9, POSITION - 1], np.int32)
    at = np.arange(sum(LENGTHS))
    valid = (at[None] >= first[:, None]) & (at[None] < POSITION)
    out, lse = host.attend(query, blocks, POSITION, first, spec)
    expected, expected_lse = numpy_attention(query, key, value, valid, spec.softcap)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_equal_scores_and_large_scores(host: HostAttention) -> None:
    value = np.random.default_rng(0).normal(size=(1, 2, 6, 8)).astype(np.float32)
    first = np.zeros(1, np.int32)
    for size in (0.0, 1e3, -1e3):
        key = np.ones((1, 2, 6, 8), np.float32)
        query = np.full((1, 2, 1, 8), size, np.float32)
        out, lse = host.attend(
            query, [HostBlock(0, (key, value))], 6, first, AttentionSpec(2, 2, 8)
        )
        np.testing.assert_allclose(out[:, :, 0], value.mean(2), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, 8 * size + np.log(6), rtol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prepared_kernels_are_those_of_a_run(tmp_path: Path, dtype: str) -> None:
    """A run after the warm-up compiles no kernel: what was prepared is all that it uses."""
    head_dim = {"float32": 12, "bfloat16": 52}[dtype]  # in no other test: kernels stay
    sizes = {"hidden_size": 4 * head_dim, "word_embed_proj_dim": 4 * head_dim}
    folder = write_checkpoint(tmp_path / "m", **sizes)
    policy = Policy.from_percent(
        100, 0, 0, 100, 100, 0, batch_size=2, kv_block_tokens=4, attention="host"
    )
    before = fold_kernel.cache_info().misses
    with LLM(folder, dtype=dtype, policy=policy) as llm:
        llm.warm_up(8, 6, 2)
        prepared = fold_kernel.cache_info().misses
        llm.generate(prompt_token_ids=[[5] * 8] * 2, sampling_params=SHORT)
    assert prepared == before + 1
    fold_kernel(CacheFormat(head_dim, dtype, 16))
    assert fold_kernel.cache_info().misses == prepared


def test_host_and_device_parts_merge(host: HostAttention) -> None:
    """Some blocks are on the device and some on the host, one of those without a valid token; the
    merged result is that of all blocks together."""
    rng = np.random.default_rng(1)
    batch, heads, dim = 2, 3, 16

    def some(tokens: int) -> np.ndarray:
        return rng.normal(size=(batch, heads, tokens, dim)).astype(np.float32)

    query, new = some(1), (some(1), some(1))
    blocks = [(some(n), some(n)) for n in (6, 4, 5)]
    starts, position = np.array([0, 6, 10], np.int32), 13
    first = np.array([0, 7], np.int32)
    here = attend_blocks(query, tuple(blocks[1:]), starts[1:], position, first)
    there = host.attend(query, [HostBlock(0, blocks[0])], position, first, SPECS["plain"])
    found, _ = merge([attend_itself(query, *new), here, there])
    key, value = (np.concatenate([b[i] for b in blocks] + [new[i]], axis=2) for i in range(2))
    at = np.arange(16)
    valid = (at[None] >= first[:, None]) & ((at[None] < position) | (at[None] == 15))
    expected, _ = numpy_attention(query, key, value, valid)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("attention", ["host", "device"])
def test_bytes_of_a_step(tmp_path: Path, attention: Any) -> None:
    """With attention on the host, the bytes of a step grow with the batch, not with the earlier
    tokens."""
    folder = write_checkpoint(tmp_path / "m", max_position_embeddings=1100)

    def step(prompt_len: int, batch_size: int) -> int:
        policy = Policy.from_percent(
            *(100, 0, 0, 100, 100, 0), batch_size=batch_size, attention=attention
        )
        with LLM(folder, dtype="float32", policy=policy, unified=False) as llm:
            llm.generate(
                prompt_token_ids=[[5 + row] * prompt_len for row in range(batch_size)],
                sampling_params=SamplingParams(max_tokens=4, ignore_eos=True),
            )
            report = llm.report()
        moved = sum(report["decode_bytes"].values())
        assert report["decode_steps"] == 3
        return moved // 3

    short, long, double = step(128, 2), step(1024, 2), step(128, 4)
    if attention == "host":
        assert short == long
        assert double == 2 * short
    else:
        assert long > 7 * short
