"""GGUF files that the package `gguf` writes: what transformers computes with them, this package
computes, and what is wrong with them is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import gguf

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.formats.decoding import decoded
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.gguf.blocks import BLOCKS, leaves_of
from flexgen_jax.models.gguf.container import MAX_ENTRIES
from flexgen_jax.models.loading import open_model
from tests.helpers.families import Reference
from tests.helpers.models import prompts

SIZES = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 270, "num_hidden_layers": 2}

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where blocks have float16 numbers."""


def random_blocks(rng: np.random.Generator, rows: int, columns: int, kind: str) -> np.ndarray:
    """Rows of random codes, whose scales make numbers of usual size."""
    block = BLOCKS[kind]
    raw = rng.integers(0, 256, (rows, columns // block.elements, block.nbytes), np.uint8)
    small = 0.3 / {"Q2_K": 24, "Q3_K": 64, "Q4_K": 500, "Q5_K": 1000, "Q6_K": 2000}.get(kind, 8)
    for at in HALVES.get(kind, ()):
        halves = (small * (0.5 + rng.random(raw.shape[:2]))).astype(np.float16)
        raw[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[:, :, 0] = rng.integers(121, 124, raw.shape[:2])
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", [kind for kind, block in BLOCKS.items() if block.format])
def test_blocks_are_those_of_the_package(kind: str) -> None:
    blocks = random_blocks(np.random.default_rng(0), 5, 768, kind)
    storage = Storage((5, 768), "float32", BLOCKS[kind].format)
    right = gguf.quants.dequantize(blocks, getattr(gguf.GGMLQuantizationType, kind))
    np.testing.assert_array_equal(decoded(leaves_of(blocks, kind), storage), right)
    assert storage.nbytes == blocks.nbytes


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order that files of LLaMA's kind have: pairs that turn together are neighbours."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tokens() -> tuple[list[str], list[int]]:
    """A vocabulary of bytes, as GPT-2 names them, and some special tokens."""
    from flexgen_jax.models.tokenizer_models import bytes_of_characters

    names = ["<unk>", "<pad>", "</s>", *bytes_of_characters()]
    names += [f"<extra{n}>" for n in range(SIZES["vocab_size"] - len(names))]
    return names, [3, 3, 3, *[1] * 256, *[3] * (len(names) - 259)]


def write_gguf(path: Path, family: str, kinds: dict[str, str], **more: Any) -> Reference:
    """Writes a model whose matrices are random blocks; returns transformers' own with the numbers
    that they stand for. kinds: types by parts of names; "" is for the others."""
    import torch

    reference = Reference(path.parent / "reference", family, 0, **SIZES, **more)
    config, rng = reference.model.config, np.random.default_rng(1)
    arch = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}[family]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or 64)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    names, types = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges([])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(2)
    table = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, arch.upper()), config.num_hidden_layers
    )
    state = reference.model.state_dict()
    for name, tensor in state.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if tensor.ndim == 1:
            rows = tensor.numpy()
            if family == "llama" and ("q_proj" in name or "k_proj" in name):
                rows = permuted(rows, _heads(config, name))
            writer.add_tensor(stored, np.ascontiguousarray(rows))
            continue
        kind = next((kind for part, kind in kinds.items() if part and part in name), kinds[""])
        blocks = random_blocks(rng, *tensor.shape, kind)
        number = getattr(gguf.GGMLQuantizationType, kind)
        plain = gguf.quants.dequantize(blocks, number)
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            blocks = permuted(blocks, _heads(config, name))
        writer.add_tensor(stored, blocks, raw_dtype=number)
        state[name] = torch.tensor(plain)
    reference.model.load_state_dict(state)
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return reference


def _heads(config: Any, name: str) -> int:
    return int(config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)


MIXES: tuple[tuple[str, dict[str, str]], ...] = (
    ("llama", {"v_proj": "Q6_K", "down": "Q6_K", "embed": "Q4_K", "": "Q4_K"}),
    ("qwen2", {"embed": "Q8_0", "o_proj": "Q5_1", "down": "Q4_1", "gate": "Q5_0", "": "Q4_0"}),
    ("qwen3", {"embed": "Q6_K", "q_proj": "Q2_K", "down": "Q3_K", "gate": "MXFP4", "": "Q5_K"}),
)


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "kinds"), MIXES)
@pytest.mark.parametrize("percent", [(100, 0, 100, 0, 100, 0), (20, 40, 20, 40, 100, 0)])
def test_logits_are_those_of_transformers(
    tmp_path: Path, family: str, kinds: dict[str, str], percent: tuple[int, ...]
) -> None:
    path = tmp_path / "model.gguf"
    more = {"head_dim": 64} if family == "qwen3" else {}
    reference = write_gguf(path, family, kinds, **more)
    policy = Policy.from_percent(*percent, batch_size=4, num_batches=2)
    with LLM(path, dtype="float32", policy=policy, offload_dir=tmp_path / "offload") as llm:
        scores = llm.score(prompt_token_ids=prompts())
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, "llama", {"": "Q8_0"})
    return path


def test_text_goes_in_and_out(whole: Path) -> None:
    with LLM(whole, policy=Policy(batch_size=1)) as llm:
        (result,) = llm.generate(["Hé, wörld"], SamplingParams(max_tokens=4, ignore_eos=True))
    model = open_model(whole, False, 0)
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("Hé, wörld")) == "Hé, wörld"
    assert len(result.token_ids) == 4


def cut(content: bytes) -> bytes:
    return content[: len(content) * 3 // 4]


def of_one_array(kind: int, count: int, content: bytes) -> bytes:
    """A file with one entry of metadata, an array of a kind."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    return head + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count) + content


def renamed(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "truncated: tensor 'blk"),
        (lambda content: content[:40], "its header cannot be read"),
        (lambda content: b"GGML" + content[4:], "is not a GGUF file"),
        (lambda content: content[:4] + struct.pack("<I", 9) + content[8:], "version 9"),
        (lambda content: content[:8] + struct.pack("<Q", 1 << 60) + content[16:], "declares"),
        (renamed(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight"), "attn_x|k_proj.weight' is miss"),
        (renamed(b"gpt2", b"bert"), "tokenizer 'bert' is not supported"),
        (renamed(b"gpt-2", b"gpt-x"), "pre-tokenizer 'gpt-x'"),
        (renamed(b"llama.block_count", b"llama.block_c0unt"), "has no llama.block_count"),
        (lambda _: of_one_array(8, MAX_ENTRIES + 1, bytes(8 << 20)), "at most are read"),
        (lambda _: of_one_array(9, 1, struct.pack("<IQ", 9, 1) * 5000), "recursion"),
        (lambda _: of_one_array(8, 1, struct.pack("<Q", 1 << 62)), "declares"),
    ],
)
def test_broken_files_are_named(
    whole: Path, tmp_path: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(change(whole.read_bytes()))
    with pytest.raises(CheckpointError, match=said) as error:
        open_model(path, False, 0)
    assert "broken.gguf" in str(error.value)
