"""Kinds of layers made for tests alone: one that keeps a row for every token, one that replaces an
array with every token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax.layers import decoder
from flexgen_jax.layers.kernels import Kernels
from flexgen_jax.layers.linear import Linear
from flexgen_jax.layers.quantization import QuantizedArray, dequantize
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import OPT, read_config
from flexgen_jax.models.parts import LayerParts, StateLeaf, linear
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import TensorSpec
from tests.helpers.models import BASE
from tests.helpers.numpy_opt import NumpyOpt

DECAY = 0.75


@dataclass(frozen=True)
class Averaging:
    """Each token gets the mean of what it and the tokens before it keep: one growing leaf."""

    size: int

    @property
    def leaves(self) -> tuple[StateLeaf, ...]:
        return (StateLeaf("kept", (self.size,)),)

    @property
    def inner_size(self) -> int:
        return 2 * self.size

    def tensors(self, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
        return linear("v", self.size, hidden, False) + linear("out", hidden, self.size, False)

    def prefill_flops(self, batch: int, tokens: int, before: int = 0) -> float:
        return 2.0 * batch * tokens * self.size


@dataclass(frozen=True)
class Fading(Averaging):
    """Each token gets a sum in which earlier tokens fade: two replaced leaves, half of it each."""

    @property
    def leaves(self) -> tuple[StateLeaf, ...]:
        half = self.size // 2
        return StateLeaf("low", (half,), grows=False), StateLeaf("high", (2, half // 2), False)


class MixerModule(nn.Module):
    """The projections of both kinds."""

    config: ModelConfig
    spec: Averaging
    kernels: Kernels
    dtype: jnp.dtype = jnp.float32
    matmul_bits: int = 16

    def setup(self) -> None:
        self.v = Linear(self.spec.size, self.kernels, False, self.dtype, self.matmul_bits)
        self.out = Linear(self.config.hidden_size, self.kernels, False, self.dtype)

    def valid(self, start: jax.Array, tokens: int, rows: Rows) -> jax.Array:
        """Which tokens are no padding, bool [batch, token, 1]."""
        return (start + jnp.arange(tokens) >= rows.first_valid[:, None])[..., None]


class AveragingModule(MixerModule):
    def mix(
        self, x: jax.Array, blocks: Any, state: Any, start: jax.Array, rows: Rows
    ) -> tuple[jax.Array, Any, Any]:
        new = self.v(x)
        total, at = jnp.zeros((x.shape[0], 1, self.spec.size)), jnp.int32(0)
        for (block,) in blocks:
            kept = dequantize(block) if isinstance(block, QuantizedArray) else block
            there = at + jnp.arange(kept.shape[1])
            mask = self.valid(at, kept.shape[1], rows) & (there < start)[None, :, None]
            total = total + jnp.where(mask, kept, 0).sum(1, keepdims=True)
            at = at + kept.shape[1]
        mask = self.valid(start, x.shape[1], rows)
        total = total + jnp.where(mask, new, 0).cumsum(1)
        count = start + 1 + jnp.arange(x.shape[1]) - rows.first_valid[:, None]
        mean = total / jnp.maximum(count, 1)[..., None]
        return self.out(mean.astype(self.dtype)), (new,), ()


class FadingModule(MixerModule):
    def mix(
        self, x: jax.Array, blocks: Any, state: Any, start: jax.Array, rows: Rows
    ) -> tuple[jax.Array, Any, Any]:
        low, high = state
        mask = self.valid(start, x.shape[1], rows)
        values = jnp.where(mask, self.v(x), 0).swapaxes(0, 1)
        before = jnp.concatenate([low, high.reshape(low.shape)], axis=-1)

        def step(total: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
            total = DECAY * total + value
            return total, total

        last, sums = jax.lax.scan(step, before, values)
        low, rest = jnp.split(last, 2, axis=-1)
        return self.out(sums.swapaxes(0, 1)), (), (low, rest.reshape(high.shape))


@contextmanager
def mixers() -> Iterator[None]:
    """Makes the kinds known for a while."""
    kinds = {Averaging: AveragingModule, Fading: FadingModule}
    decoder.MIXERS.update(kinds)
    try:
        yield
    finally:
        for kind in kinds:
            del decoder.MIXERS[kind]


def mixed_config() -> ModelConfig:
    """OPT with an attention layer, two layers of either kind, and attention again."""
    base = read_config(BASE)
    (attention,) = base.kinds
    averaging, fading = (
        LayerParts(Averaging(32), attention.mlp),
        LayerParts(Fading(16), attention.mlp),
    )
    return replace(base, kinds=(attention, averaging, fading), pattern=(0, 1, 2, 1, 2, 0))


class RandomWeights:
    """Weights that are spread widely enough for greedy tokens to vary."""

    reads_at_once = 1

    def __init__(self, config: ModelConfig) -> None:
        rng = np.random.default_rng(3)
        self.tensors = {
            key: rng.normal(key.endswith("scale"), 0.2, tensor.shape).astype(np.float32)
            for key, tensor in model_spec(config).tensors.items()
        }

    def read(self, tensor: TensorSpec, start: int, stop: int, dtype: str) -> np.ndarray:
        return self.tensors[tensor.key][start:stop].astype(dtype)

    def fingerprint(self, dtype: str) -> str:
        return f"random-{dtype}"

    content = fingerprint


class NumpyMixed(NumpyOpt):
    """The same model in NumPy, by the formulas, over whole sequences."""

    def __init__(self, config: ModelConfig, weights: RandomWeights) -> None:
        self.kinds = [config.kinds[kind].mixer for kind in config.pattern]
        tensors = {}
        for layer in model_spec(config).layers:
            for tensor in layer.tensors:
                is_own = tensor.path.startswith("attention.") and not layer.attends
                own = tensor.path.removeprefix("attention.").removesuffix(".kernel")
                name = f"decoder.layers.{layer.number}.self_attn.{own}.weight"
                name = name if is_own else OPT.stored(tensor, config).name
                tensors[name] = weights.tensors[tensor.key]
        super().__init__(BASE | {"num_hidden_layers": len(self.kinds)}, tensors)

    def attention(self, x: np.ndarray, name: str) -> np.ndarray:
        kind = self.kinds[int(name.split(".")[2])]
        if not isinstance(kind, Averaging):
            return super().attention(x, name)
        kept = self.linear(x, f"{name}.v")
        if isinstance(kind, Fading):
            ages = np.subtract.outer(np.arange(len(x)), np.arange(len(x)))
            mixed = np.where(ages >= 0, DECAY ** np.maximum(ages, 0), 0.0) @ kept
        else:
            mixed = kept.cumsum(0) / np.arange(1, len(x) + 1)[:, None]
        return self.linear(mixed, f"{name}.out")
