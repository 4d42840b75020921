"""LLaMA, and a mixture of experts in its shape, in plain NumPy: a reference that needs no PyTorch.

Written from the papers: Touvron et al. 2023 ("LLaMA", section 2.2: RMS norm before each block,
SwiGLU, rotary embeddings), Ainslie et al. 2023 ("GQA", section 2.2), Jiang et al. 2024 ("Mixtral",
section 2.1: the softmax over the chosen experts' logits).
"""

from __future__ import annotations

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class NumpyLlama:
    """Full-sequence forward passes in float64 from Hugging Face's own config and tensors."""

    def __init__(self, config: dict[str, Any], tensors: Tensors) -> None:
        self.config = config
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
