"""The magnitudes of matmul inputs on a sample text, which weight quantization errors (Lin et al.
2024, "AWQ", section 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.cpu import kernels_of_device
from flexgen_jax.errors import UserError
from flexgen_jax.layers.decoder import DecoderLayer
from flexgen_jax.layers.embedding import Embedding
from flexgen_jax.layers.linear import Linear
from flexgen_jax.layers.programs.table import apply
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.weight_source import WeightSource

WINDOW, WINDOWS = 512, 16
"""Tokens that are computed together, and the most such windows of a text."""


def windows_of_text(ids: list[int], context_len: int) -> np.ndarray:
    """Returns a text's tokens in windows, int32 [window, token]; raises `UserError` for a text of
    fewer tokens than a few. context_len: the model's context."""
    length = min(WINDOW, context_len, len(ids))
    count = min(WINDOWS, len(ids) // max(1, length))
    if length < 2:
        raise UserError("the text of --calibrate has too few tokens; use at least a page")
    return np.array(ids[: count * length], np.int32).reshape(count, length)


def input_sizes(
    source: WeightSource, ids: np.ndarray, begin: Callable[[str], object] = lambda name: None
) -> dict[str, np.ndarray]:
    """Returns for the kernels of decoder layers, by key, the mean square of each of their input's
    elements, fp32 [in].

    ids: int32 [window, token]; begin: called with the name of each layer. One layer is in memory at
    a time, in fp32. Raises `UserError` for a mixture of experts, where few tokens reach each
    expert.
    """
    config = source.config
    if config.has_experts:
        raise UserError(
            f"--calibrate does not support mixtures of experts such as {config.model_type}; "
            "remove it"
        )
    spec, kernels = model_spec(config), kernels_of_device()
    count, tokens = ids.shape
    rows = Rows.of(np.zeros(count, np.int32), tokens)
    embedding = Embedding(config, kernels, jnp.dtype("float32"))
    hidden = apply(embedding, _weights(source, spec.embedding), ids, jnp.int32(0), rows)
    runs: dict[int, Any] = {}
    sizes: dict[str, np.ndarray] = {}
    for layer in spec.decoders:
        begin(layer.name)
        layer_kind = spec.alike[layer.index]
        if layer_kind not in runs:
            module = DecoderLayer(
                config=config,
                parts=layer.decoder,
                kernels=kernels,
                dtype=jnp.dtype("float32"),
            )
            runs[layer_kind] = jax.jit(partial(_watched, module))
        hidden, squares = runs[layer_kind](_weights(source, layer), hidden, rows)
        keys = {tensor.path: tensor.key for tensor in layer.tensors}
        sizes |= {keys[path]: np.asarray(square) for path, square in squares.items()}
    return sizes


def _weights(source: WeightSource, layer: LayerSpec) -> dict[str, jax.Array]:
    return {
        tensor.path: jnp.asarray(source.read(tensor, 0, tensor.shape[0], "float32"))
        for tensor in layer.tensors
    }


def _watched(
    module: DecoderLayer, weights: dict[str, jax.Array], hidden: jax.Array, rows: Rows
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns a layer's hidden states, and the mean squares of its products' inputs by the path of
    the kernel."""
    squares: dict[str, jax.Array] = {}

    def watch(call: Any, arguments: Any, options: Any, context: Any) -> Any:
        if isinstance(context.module, Linear):
            path = ".".join((*context.module.path, "kernel"))
            x = arguments[0].astype(jnp.float32)
            squares[path] = jnp.square(x).reshape(-1, x.shape[-1]).mean(0)
        return call(*arguments, **options)

    with nn.intercept_methods(watch):
        hidden, _ = apply(module, weights, hidden, rows, method="prefill")
    return hidden, squares
