"""OPT in plain NumPy, written from its formulas: the reference that needs no PyTorch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from scipy.special import erf

Tensors = dict[str, np.ndarray]


class NumpyOpt:
    """Full-sequence forward passes in float64 from Hugging Face's own config and tensors.

    sparsity: each token attends to itself and to this fraction of the tokens before it, those with
    the highest scores; the weights of the others are dropped.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: Tensors,
        sparsity: float = 1.0,
        folder: Path = Path(),
    ) -> None:
        self.folder = folder
        self.config = config
        self.sparsity = sparsity
        self.tensors = {
            name.removeprefix("model."): value.astype(np.float64) for name, value in tensors.items()
        }

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        out = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return out if bias is None else out + bias

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        if self.config.get("layer_norm_elementwise_affine", True):
            x = x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]
        return x

    def activation(self, x: np.ndarray) -> np.ndarray:
        if self.config["activation_function"] == "relu":
            return np.maximum(x, 0)
        return x * 0.5 * (1 + erf(x / np.sqrt(2)))

    def attention(self, x: np.ndarray, name: str) -> np.ndarray:
        tokens, hidden = x.shape
        heads = self.config["num_attention_heads"]
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj").reshape(tokens, heads, -1).swapaxes(0, 1)
            for part in "qkv"
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(hidden // heads)
        scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        for i in range(tokens):
            dropped = i - math.ceil(round(self.sparsity * i, 9))
            lowest = np.argsort(weights[:, i, :i], axis=-1)[:, :dropped]
            np.put_along_axis(weights[:, i], lowest, 0.0, axis=-1)
        out = weights @ v
        return self.linear(out.swapaxes(0, 1).reshape(tokens, hidden), f"{name}.out_proj")

    def logits(self, ids: list[int]) -> np.ndarray:
        """Returns the logits of all tokens, fp64 [token, vocabulary]."""
        config, tensors = self.config, self.tensors
        pre_norm = config["do_layer_norm_before"]
        x = tensors["decoder.embed_tokens.weight"][ids]
        if "decoder.project_in.weight" in tensors:
            x = self.linear(x, "decoder.project_in")
        x = x + tensors["decoder.embed_positions.weight"][np.arange(len(ids)) + 2]
        for i in range(config["num_hidden_layers"]):
            layer = f"decoder.layers.{i}"
            for norm, block in (
                ("self_attn_layer_norm", lambda y, n=layer: self.attention(y, f"{n}.self_attn")),
                ("final_layer_norm", lambda y, n=layer: self.mlp(y, n)),
            ):
                inner = self.norm(x, f"{layer}.{norm}") if pre_norm else x
                x = x + block(inner)
                x = x if pre_norm else self.norm(x, f"{layer}.{norm}")
        if pre_norm and not config.get("_remove_final_layer_norm", False):
            x = self.norm(x, "decoder.final_layer_norm")
        if "decoder.project_out.weight" in tensors:
            x = self.linear(x, "decoder.project_out")
        table = "decoder.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        return x @ tensors[table].T

    def mlp(self, x: np.ndarray, layer: str) -> np.ndarray:
        return self.linear(self.activation(self.linear(x, f"{layer}.fc1")), f"{layer}.fc2")

    def greedy(self, ids: list[int], count: int) -> list[int]:
        ids = list(ids)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[-count:]

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Returns the log-probability of every token but the first, given those before it."""
        logits = self.logits(ids[:-1] or ids)  # the last one only is scored
        logits = logits - logits.max(-1, keepdims=True)
        table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return table[np.arange(len(ids) - 1), ids[1:]]


def reference(folder: Path) -> NumpyOpt:
    """The model of a checkpoint's folder."""
    config = json.loads((folder / "config.json").read_text())
    return NumpyOpt(config, load_file(folder / "model.safetensors"), folder=folder)
