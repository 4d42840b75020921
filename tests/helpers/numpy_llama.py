"""LLaMA, and a mixture of experts in its shape, in plain NumPy: a reference that needs no PyTorch.

Written from the papers: Touvron et al. 2023 ("LLaMA", section 2.2: RMS norm before each block,
SwiGLU, rotary embeddings), Ainslie et al. 2023 ("GQA", section 2.2), Jiang et al. 2024 ("Mixtral",
section 2.1: the softmax over the chosen experts' logits).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from flexgen_jax.models.families import family_of, read_config
from flexgen_jax.models.spec_of_config import model_spec
from tests.helpers.models import byte_tokenizer

Tensors = dict[str, np.ndarray]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
}


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class NumpyLlama:
    """Full-sequence forward passes in float64 from Hugging Face's own config and tensors.

    routing: the experts that each token of the last pass has chosen, by layer.
    """

    def __init__(self, config: dict[str, Any], tensors: Tensors, folder: Path = Path()) -> None:
        self.folder = folder
        self.config = config
        self.routing: dict[str, list[frozenset[int]]] = {}
        self.tensors = {name: value.astype(np.float64) for name, value in tensors.items()}

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Turns pairs of elements of x, [head, token, head_dim], as complex numbers."""
        _, tokens, size = x.shape
        angles = np.outer(np.arange(tokens), 1e4 ** (-np.arange(0, size, 2) / size))
        pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]
        turned = pairs * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def attention(self, x: np.ndarray, name: str) -> np.ndarray:
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj").reshape(len(x), count, -1).swapaxes(0, 1)
            for part, count in (("q", heads), ("k", kv), ("v", kv))
        )
        q, k = self.rotated(q), self.rotated(k)
        seen = np.tril(np.ones((len(x), len(x)), bool))
        outs = []
        for head in range(heads):
            mine = head * kv // heads
            scores = q[head] @ k[mine].T / np.sqrt(q.shape[-1])
            outs.append(softmax(np.where(seen, scores, -np.inf)) @ v[mine])
        return self.linear(np.concatenate(outs, axis=-1), f"{name}.o_proj")

    def swiglu(self, x: np.ndarray, gate: str, up: str, down: str) -> np.ndarray:
        inner = self.linear(x, gate)
        return self.linear(inner / (1 + np.exp(-inner)) * self.linear(x, up), down)

    def feed_forward(self, x: np.ndarray, layer: str) -> np.ndarray:
        if "num_local_experts" not in self.config:
            return self.swiglu(x, *(f"{layer}.mlp.{part}_proj" for part in ("gate", "up", "down")))
        logits, top = self.linear(x, f"{layer}.block_sparse_moe.gate"), 2
        out = np.zeros_like(x)
        self.routing[layer] = [frozenset(np.argsort(-row)[:top].tolist()) for row in logits]
        for token, row in enumerate(logits):
            chosen = np.argsort(-row)[:top]
            for share, number in zip(softmax(row[chosen]), chosen, strict=True):
                expert = f"{layer}.block_sparse_moe.experts.{number}"
                names = (f"{expert}.{part}" for part in ("w1", "w3", "w2"))
                out[token] += share * self.swiglu(x[token], *names)
        return out

    def logits(self, ids: list[int]) -> np.ndarray:
        """Returns the logits of all tokens, fp64 [token, vocabulary]."""
        x = self.tensors["model.embed_tokens.weight"][ids]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            x = x + self.attention(self.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            x = x + self.feed_forward(self.norm(x, f"{layer}.post_attention_layernorm"), layer)
        return self.linear(self.norm(x, "model.norm"), "lm_head")

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Returns the log-probability of every token but the first, given those before it."""
        table = np.log(softmax(self.logits(ids)))
        return table[np.arange(len(ids) - 1), ids[1:]]

    def greedy(self, ids: list[int], count: int) -> list[int]:
        ids = list(ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[-count:]


def write(folder: Path, raw: dict[str, Any]) -> NumpyLlama:
    """Writes a folder with random weights."""
    folder.mkdir(exist_ok=True)
    config, rng = read_config(raw), np.random.default_rng(0)
    tensors = {}
    for spec in model_spec(config).tensors.values():
        name = family_of(config).stored(spec, config).name
        full = name if name.startswith("lm_head") else f"model.{name}"
        is_scale = spec.path.endswith("scale")
        tensors[full] = (rng.normal(0, 0.3, spec.shape) + is_scale).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return NumpyLlama(raw, load_file(folder / "model.safetensors"), folder)
