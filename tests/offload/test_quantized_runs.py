"""Tests generation with quantized weights and KV cache, through every tier."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.layers.quantization import dequantize, quantize
from flexgen_jax.models.families import read_config
from flexgen_jax.models.formats.storage import GROUP_SIZE
from flexgen_jax.models.tensor_spec import Formats, TensorSpec
from flexgen_jax.offload import weights
from flexgen_jax.offload.device import Device
from flexgen_jax.offload.disk import folder
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.search.memory import workspace_bytes
from tests.helpers.cases import covering
from tests.helpers.models import BASE, prompts, write_checkpoint
from tests.helpers.numpy_opt import NumpyOpt
from tests.helpers.numpy_quantization import dequantized

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
KV_BLOCK = 8


class CachedOpt(NumpyOpt):
    """A NumPy OPT whose queries see the keys and values of sealed blocks as quantization left
    them."""

    def __init__(self, config: dict[str, Any], tensors: Any, bits: int) -> None:
        super().__init__(config, tensors)
        self.bits = bits

    def attention(self, x: np.ndarray, name: str) -> np.ndarray:
        """Computes attention as if one forced token followed another.

        The prompt is 1 token, whose block is sealed at once; then come blocks of KV_BLOCK tokens,
        each sealed when it is full.
        """
        tokens, hidden = x.shape
        heads = self.config["num_attention_heads"]
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj").reshape(tokens, heads, -1).swapaxes(0, 1)
            for part in "qkv"
        )
        left = [
            dequantized(y.astype(np.float32), self.bits, hidden // heads, 2).astype(np.float64)
            for y in (k, v)
        ]
        out = np.zeros_like(q)
        for at in range(tokens):
            sealed = 0 if at == 0 else 1 + (at - 1) // KV_BLOCK * KV_BLOCK
            seen = [
                np.concatenate([some[:, :sealed], whole[:, sealed : at + 1]], axis=1)
                for some, whole in zip(left, (k, v), strict=True)
            ]
            scores = np.einsum("hd,htd->ht", q[:, at], seen[0]) / np.sqrt(hidden // heads)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[:, at] = np.einsum("ht,htd->hd", weights, seen[1])
        return self.linear(out.swapaxes(0, 1).reshape(tokens, hidden), f"{name}.out_proj")


def model_files(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variant", "bits"), covering(["base", "350m", "untied", "galactica"], [4, 8], together=1)
)
def test_quantized_weights_are_what_the_formula_leaves(
    checkpoint: Callable[[str], Path], variant: str, bits: int
) -> None:
    """A NumPy OPT with every matrix replaced by its dequantized self gives the same tokens."""
    config, tensors = model_files(checkpoint(variant))
    left = {
        name: dequantized(x, bits, GROUP_SIZE, 0) if x.ndim == 2 else x
        for name, x in tensors.items()
    }
    model = NumpyOpt(config, left)
    with LLM(checkpoint(variant), dtype="float32", weight_bits=bits, weight_format="paper") as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=GREEDY)
        scores = llm.score(prompt_token_ids=prompts())
    for ids, result, score in zip(prompts(), results, scores, strict=True):
        assert result.token_ids == model.greedy(ids, 32)
        np.testing.assert_allclose(score.logprobs, model.logprobs(ids), rtol=1e-3, atol=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [16, pytest.param(8, marks=pytest.mark.slow), 4])
def test_scores_through_the_cache(checkpoint: Callable[[str], Path], bits: int) -> None:
    config, tensors = model_files(checkpoint())
    model = NumpyOpt(config, tensors) if bits == 16 else CachedOpt(config, tensors, bits)
    policy = Policy(batch_size=2, num_batches=2, kv_block_tokens=KV_BLOCK, cache_bits=bits)
    with LLM(checkpoint(), dtype="float32", policy=policy) as llm:
        scores = llm.score(prompt_token_ids=prompts(), through_cache=True)
    for ids, score in zip(prompts(), scores, strict=True):
        assert score.token_ids == ids
        np.testing.assert_allclose(score.logprobs, model.logprobs(ids), rtol=1e-3, atol=1e-3)


def test_a_text_of_one_token_is_scored_beside_longer_ones(
    checkpoint: Callable[[str], Path],
) -> None:
    """The text is in a batch of its own, which ends before the others of its block do."""
    policy = Policy(batch_size=1, num_batches=2, schedule="row")
    with LLM(checkpoint(), dtype="float32", policy=policy) as llm:
        scores = llm.score(prompt_token_ids=[[5], [5, 6, 7]], through_cache=True)
    assert [len(score.logprobs) for score in scores] == [0, 2]


def test_stored_weights_are_packed_and_reused(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The second run starts from the packed files; another width does not."""
    policy = Policy.from_percent(0, 0, 100, 0, 100, 0)

    def run(bits: int) -> dict[str, int]:
        options = {"policy": policy, "dtype": "float32", "offload_dir": tmp_path}
        with LLM(checkpoint(), weight_bits=bits, **options) as llm:
            llm.generate(
                prompt_token_ids=prompts()[:1], sampling_params=SamplingParams(max_tokens=3)
            )
        files = tmp_path.glob("weights/*/*/c/**/*")
        return {str(path): path.stat().st_mtime_ns for path in files if path.is_file()}

    first = run(4)
    assert run(4) == first
    # Simulates `kill -9` between two leaves.
    (damaged,) = tmp_path.glob("weights/*/decoder.0.mlp.up.kernel.scale")
    shutil.rmtree(damaged)
    assert set(run(4)) == set(first)
    first = run(4)
    assert any(name.split("/c/")[0].endswith("kernel.packed") for name in first)
    both = run(8)
    assert {name: both[name] for name in first} == first
    assert len(both) > len(first)


@pytest.mark.parametrize(
    ("percent", "tier", "links"),
    [
        ((100, 0, 100, 0, 100, 0), "device", ()),
        ((0, 100, 0, 100, 100, 0), "host", ("host_to_device",)),
        ((0, 0, 0, 0, 100, 0), "disk", ("disk_read", "disk_write")),
    ],
)
def test_bytes_are_counted_packed(
    tmp_path: Path, percent: tuple[int, ...], tier: Any, links: tuple[str, ...]
) -> None:
    """4-bit weights and KV blocks are at most 0.29 of their 16-bit bytes, stored and on the
    links."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "vocab_size": 512}
    more = {"num_attention_heads": 2, "max_position_embeddings": 254}
    folder = write_checkpoint(tmp_path / "model", **sizes, **more)
    rows: dict[int, dict[str, int]] = {}
    for bits in (16, 4):
        policy = Policy.from_percent(
            *percent,
            batch_size=2,
            attention="device",
            weight_bits=bits,
            weight_format="paper",
            cache_bits=bits,
        )
        options = {"policy": policy, "dtype": "bfloat16", "offload_dir": tmp_path / "offload"}
        with LLM(folder, **options, unified=tier == "disk") as llm:
            llm.generate(
                prompt_token_ids=[[5] * 128] * 2,
                sampling_params=SamplingParams(max_tokens=2, ignore_eos=True),
            )
            report, config = llm.report(), llm.config
        rows[bits] = {link: report["bytes"][link] for link in links}
        rows[bits]["stored"] = report["peak_bytes"][tier]
        if tier == "device":  # also holds temporaries and hidden states
            formats = policy.formats("bfloat16")
            rows[bits]["stored"] -= (
                workspace_bytes(Setting(config, "float32", unified=False), formats, 2, 128)
                + 2 * 128 * 128 * 2
            )
    for name, nbytes in rows[4].items():
        assert nbytes <= 0.29 * rows[16][name], name


def test_quantizing_in_pieces_is_quantizing() -> None:
    """`WeightStore` quantizes one range of rows after another, with the result of doing it at
    once."""
    x = np.random.default_rng(0).normal(size=(200, 24)).astype(np.float32)

    class Source:
        reads_at_once = 3

        def read(self, _tensor: Any, start: int, stop: int, _dtype: str) -> np.ndarray:
            return x[start:stop]

    tensor = TensorSpec("k", x.shape, "k")
    whole = quantize(x, 4, 64, 0)
    expected = (whole.packed, whole.scale, whole.minimum)
    leaves = [np.zeros(leaf.shape, leaf.dtype) for leaf in expected]
    config = read_config(BASE)
    device = Device.create(config, Formats("float32", 4, weight_format="paper"))
    store = weights.WeightStore(device, Source(), {}, Ledger({}))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "CHUNK_BYTES", 64 * 24 * 4)
        store._fill(tensor, leaves)
    for found, leaf in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(found, leaf)
    np.testing.assert_allclose(dequantize(whole), x, atol=1)
