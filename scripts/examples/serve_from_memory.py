"""Generates with a model that a JAX program has in memory, without saving it, in 4 bits.

    python scripts/examples/serve_from_memory.py

A LLaMA of two layers learns its own first lines by heart, as Flax modules; then the engine takes
its arrays by the names that Hugging Face gives them, and continues a prompt.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from flexgen_jax import LLM, Model, SamplingParams

BYTES, HEADS, THETA, EPSILON = 256, 4, 10000.0, 1e-5
TEXT = "Generates with a model that a JAX program has in memory, without saving it, in 4 bits."


def turned(x: jax.Array) -> jax.Array:
    """Returns queries or keys, [token, head, element], turned by their positions."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[0]), THETA ** (-jnp.arange(half) / half))[:, None]
    low, high = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


class Llama(linen.Module):
    width: int
    layers: int

    @linen.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns the logits of a text, [token, byte]."""

        def linear(name: str, size: int, x: jax.Array) -> jax.Array:
            return jnp.asarray(linen.Dense(size, use_bias=False, name=name)(x))

        def norm(name: str, x: jax.Array) -> jax.Array:
            return jnp.asarray(linen.RMSNorm(EPSILON, name=name)(x))

        x = linen.Embed(BYTES, self.width, name="model.embed_tokens")(ids)
        seen = jnp.tril(jnp.ones((ids.size, ids.size), bool))
        for number in range(self.layers):
            at, size = f"model.layers.{number}", self.width
            y = norm(f"{at}.input_layernorm", x)
            query, key, value = (
                linear(f"{at}.self_attn.{part}_proj", size, y).reshape(ids.size, HEADS, -1)
                for part in "qkv"
            )
            scores = jnp.einsum("qhd,khd->hqk", turned(query), turned(key))
            scores = jnp.where(seen, scores * (size // HEADS) ** -0.5, -jnp.inf)
            mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), value)
            x += linear(f"{at}.self_attn.o_proj", size, mixed.reshape(ids.size, -1))
            y = norm(f"{at}.post_attention_layernorm", x)
            gate = linear(f"{at}.mlp.gate_proj", 3 * size, y)
            up = linear(f"{at}.mlp.up_proj", 3 * size, y)
            x += linear(f"{at}.mlp.down_proj", size, jax.nn.silu(gate) * up)
        return linear("lm_head", BYTES, norm("model.norm", x))


def trained(width: int, layers: int, steps: int) -> Any:
    """Returns parameters that know the text, and the loss."""
    ids = jnp.asarray(np.frombuffer(TEXT.encode(), np.uint8), jnp.int32)
    model, adam = Llama(width, layers), optax.adam(3e-3)
    params = model.init(jax.random.key(0), ids)["params"]

    def loss(params: Any) -> jax.Array:
        logits = model.apply({"params": params}, ids)[:-1]
        losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, ids[1:])
        return losses.mean()

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params)
        changes, state = adam.update(gradient, state)
        return optax.apply_updates(params, changes), state, value

    state = adam.init(params)
    for _ in range(steps):
        params, state, value = step(params, state)
    return params, float(value)


def as_hugging_face(params: Any) -> dict[str, jax.Array]:
    """Returns the parameters by Hugging Face's names; its kernels are [out, in]."""
    tensors = {}
    for name, parts in params.items():
        ((kind, array),) = parts.items()
        tensors[f"{name}.weight"] = array.T if kind == "kernel" else array
    return tensors


def config_of(width: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": BYTES,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
    }


def continued(params: Any, config: dict[str, Any], begins: str, bits: int) -> str:
    """Returns the text that the engine makes of its first characters."""
    model = Model.from_arrays(config, as_hugging_face(params), name="from memory")
    count = len(TEXT) - len(begins)
    wanted = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    with LLM(model, dtype="float32", weight_bits=bits) as llm:
        (result,) = llm.generate(prompt_token_ids=[[*begins.encode()]], sampling_params=wanted)
    return begins + bytes(result.token_ids).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=4)
    args = parser.parse_args()
    params, loss = trained(args.width, args.layers, args.steps)
    print(f"loss {loss:.4f}")
    print(continued(params, config_of(args.width, args.layers), TEXT[:10], args.bits))


if __name__ == "__main__":
    main()
