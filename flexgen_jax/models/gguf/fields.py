"""Fields of config.json that several architectures have, from a GGUF file's metadata."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.keys import Keys


def layer_count(keys: Keys) -> int:
    """Returns the number of layers. The last blocks of some models predict further tokens, which
    inference does without."""
    return int(keys.need("block_count")) - int(keys.maybe("nextn_predict_layers") or 0)


def types_by_layer(keys: Keys, name: str, every: int, kinds: tuple[str, str]) -> list[str]:
    """Returns the type of each layer. Metadata `name` is an array, where true means `kinds[0]`, or
    a number n: every n-th layer is of `kinds[1]`. every: n, if there is no such metadata."""
    first, other = kinds
    layers, said = layer_count(keys), keys.maybe(name)
    if np.ndim(said):
        return [first if value else other for value in keys.by_layer(name, layers)]
    every = every if said is None else int(said)
    return [other if every and layer % every == every - 1 else first for layer in range(layers)]


def windows_by_layer(keys: Keys, every: int) -> list[str]:
    """Returns which layers have a window; every `every`th one has none, unless the file says
    otherwise."""
    kinds = "sliding_attention", "full_attention"
    return types_by_layer(keys, "attention.sliding_window_pattern", every, kinds)


def block_types(keys: Keys) -> list[str]:
    """Returns whether the block of each layer has experts ("sparse") or not ("dense")."""
    layers = range(layer_count(keys))
    return ["sparse" if keys.has(f"blk.{n}.ffn_gate_inp.weight") else "dense" for n in layers]


def has_in_some_layer(keys: Keys, part: str) -> bool:
    """Returns whether a layer has a tensor, such as "exp_probs_b.bias"."""
    return any(keys.has(f"blk.{layer}.{part}") for layer in range(layer_count(keys)))


def biases(keys: Keys) -> dict[str, Any]:
    """Whether products have biases, in the fields of several families."""
    return {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "attention_out_bias": keys.has("blk.0.attn_output.bias"),
        "use_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }


def expert_sizes(keys: Keys) -> dict[str, Any]:
    """The sizes that most mixtures of experts have."""
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.maybe("expert_feed_forward_length"),
    }


def local_expert_sizes(keys: Keys) -> dict[str, Any]:
    """The sizes of mixtures of experts in the fields that Mixtral has."""
    return {
        "num_local_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
    }


def rope_of(keys: Keys) -> dict[str, Any]:
    """Returns the rotary embeddings. Factors of frequencies, which files have for LLaMA 3, are
    those of "longrope" with one kind of length."""
    theta = float(keys.maybe("rope.freq_base") or 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    scaling_type, length = keys.maybe("rope.scaling.type"), keys.need("context_length")
    if keys.has("rope_freqs.weight"):
        factor_list = keys.floats("rope_freqs.weight")
        return rope | {
            "rope_type": "longrope",
            "short_factor": factor_list,
            "long_factor": factor_list,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    original = keys.maybe("rope.scaling.original_context_length")
    share = keys.maybe("rope.scaling.attn_factor")
    factor = keys.maybe("rope.scaling.factor") or keys.maybe("rope.scale_linear")
    if scaling_type is None and factor and float(factor) != 1.0:  # of older files
        scaling_type = "linear"
    if scaling_type in ("linear", "yarn"):
        if not factor:
            keys.need("rope.scaling.factor")
        rope |= {"rope_type": scaling_type, "factor": float(factor)}
        if scaling_type == "yarn":
            rope |= _yarn(keys, original, share)
    elif scaling_type == "longrope" and keys.has("rope_factors_long.weight"):
        pass  # the architecture reads the factors
    elif scaling_type not in (None, "none"):
        raise CheckpointError(f"{keys.file.path}: rope scaling {scaling_type!r} is not supported")
    return rope


def _yarn(keys: Keys, original: int | None, share: float | None) -> dict[str, Any]:
    """Returns YaRN's parameters other than the factor."""
    fields: dict[str, Any] = {"original_max_position_embeddings": original or None}
    for name in ("beta_fast", "beta_slow"):
        fields[name] = keys.maybe(f"rope.scaling.yarn_{name}")
    if share is not None:
        factor = float(keys.need("rope.scaling.factor"))
        fields["attention_factor"] = _yarn_attention(factor, float(share))
    return {name: value for name, value in fields.items() if value is not None}


def _yarn_attention(factor: float, share: float) -> float:
    """Returns the factor of attention of YaRN, whose own is 0.1 ln(factor) + 1, times a share."""
    return share * (0.1 * log(factor) + 1.0 if factor > 1 else 1.0)


def plain_rope(keys: Keys, theta: float) -> dict[str, Any]:
    """Returns the rotary embeddings of layers with a window; theta: unless the file says it."""
    theta = float(keys.maybe("rope.freq_base_swa") or theta)
    return {"rope_type": "default", "rope_theta": theta}


def partial_rope(keys: Keys) -> dict[str, Any]:
    """The rotation of a head's first elements alone."""
    share = keys.need("rope.dimension_count") / keys.need("attention.key_length")
    return {
        "partial_rotary_factor": share,
        "rope_parameters": rope_of(keys) | {"partial_rotary_factor": share},
    }
