"""A GGUF file's metadata as the config.json of the model that it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.architectures import architecture_of
from flexgen_jax.models.gguf.container import GgufFile
from flexgen_jax.models.gguf.fields import layer_count, rope_of
from flexgen_jax.models.gguf.keys import Keys


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the config; raises `CheckpointError` for an architecture that is not read, or if
    something that it needs is missing."""
    architecture = architecture_of(file)
    keys = Keys(file, str(file.metadata["general.architecture"]))
    config = _common(keys) | {"model_type": architecture.model_type} | architecture.config(keys)
    for field, name in BY_LAYER.items():
        if np.ndim(config[field]):
            config[field] = _of_all_layers(keys, name)
    _check(keys, architecture.expects)
    if "output.weight" not in file.tensors:
        config["tie_word_embeddings"] = True
    return {name: x for name, x in config.items() if x is not None or name in NULL}


def _common(keys: Keys) -> dict[str, Any]:
    shapes = [keys.file.tensors[n].shape for n in ("token_embd.weight",) if n in keys.file.tensors]
    if not shapes:
        raise CheckpointError(f"{keys.file.path}: tensor 'token_embd.weight' is missing")
    return {
        "vocab_size": shapes[0][0],
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": layer_count(keys),
        "num_attention_heads": keys.need("attention.head_count"),
        "num_key_value_heads": keys.maybe("attention.head_count_kv"),
        "head_dim": keys.maybe("attention.key_length"),
        "intermediate_size": keys.maybe("feed_forward_length"),
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.maybe("attention.layer_norm_rms_epsilon"),
        "bos_token_id": keys.special("bos"),
        "eos_token_id": keys.special("eos"),
        "pad_token_id": keys.special("padding"),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "rope_parameters": rope_of(keys),
    }


def _check(keys: Keys, expects: Mapping[str, float]) -> None:
    """Raises `CheckpointError` for metadata that changes the model in a way that is not done: all
    that has not been read must have no effect. expects: the values that have none for an
    architecture."""
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    size = keys.maybe("attention.key_length") or hidden // int(np.max(heads))
    usual = {"attention.value_length": size, "rope.dimension_count": size}
    usual["rope.freq_base_swa"] = keys.maybe("rope.freq_base")
    neutral = {**NEUTRAL, **usual, **expects}
    for name, value in keys.unread().items():
        is_neutral = name in UNUSED or (name in neutral and float(value) == neutral[name])
        if not is_neutral:
            raise keys.refused(name, value)


def _of_all_layers(keys: Keys, name: str) -> int:
    """Returns the value that all layers have."""
    values = {int(value) for value in keys.by_layer(name, layer_count(keys))}
    if len(values) != 1:
        raise keys.refused(name, "different values for different layers")
    return values.pop()


BY_LAYER = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
}
"""Fields with their metadata, which may be an array with a value for each layer."""

NULL = ("q_lora_rank", "sliding_window")
"""Fields that are null where there is nothing, since transformers has another default."""

UNUSED = frozenset(
    (
        *("vocab_size", "features_length", "embedding_length_out", "tensor_data_layout"),
        *("rope.scaling.finetuned", "rope.dimension_sections", "n_deepstack_layers"),
        *("pooling_type", "classifier.output_labels", "attention.layer_norm_epsilon"),
        *("attention.layer_norm_rms_epsilon", "hidden_activation", "no_rope_layer_step"),
    )
)
"""Metadata without effect on the logits of a text: sizes that the tensors show, sections of
rotations for images, pooling and classifiers."""

NEUTRAL: Mapping[str, float] = {
    "attention.causal": 1.0,
    "expert_count": 0.0,
    "expert_used_count": 0.0,
    "expert_shared_count": 0.0,
    "expert_gating_func": 1.0,
    "expert_weights_norm": 0.0,
    "expert_group_count": 1.0,
    "expert_group_used_count": 1.0,
    "leading_dense_block_count": 0.0,
    "interleave_moe_layer_step": 1.0,
    "attention.sliding_window": 0.0,
    "attention.shared_kv_layers": 0.0,
    "attention.temperature_scale": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.output_scale": 1.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "expert_weights_scale": 1.0,
    "use_parallel_residual": 0.0,
}
"""Values without effect."""
