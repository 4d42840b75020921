"""A GGUF file's metadata as the config.json of the model that it was made from."""

from __future__ import annotations

from typing import Any

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.architectures import architecture_of
from flexgen_jax.models.gguf.container import GgufFile
from flexgen_jax.models.gguf.keys import Keys, rope_of


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the config; raises `CheckpointError` for an architecture that is not read, or if
    something that it needs is missing."""
    architecture = architecture_of(file)
    keys = Keys(file, str(file.metadata["general.architecture"]))
    _check(keys, architecture.done)
    config = _common(keys) | {"model_type": architecture.model_type} | architecture.config(keys)
    if "output.weight" not in file.tensors:
        config["tie_word_embeddings"] = True
    return {name: value for name, value in config.items() if value is not None}


def _common(keys: Keys) -> dict[str, Any]:
    shapes = [keys.file.tensors[n].shape for n in ("token_embd.weight",) if n in keys.file.tensors]
    if not shapes:
        raise CheckpointError(f"{keys.file.path}: tensor 'token_embd.weight' is missing")
    # The last blocks of some models predict further tokens, which inference does without.
    predicting = int(keys.maybe("nextn_predict_layers") or 0)
    return {
        "vocab_size": shapes[0][0],
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": keys.need("block_count") - predicting,
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


def _check(keys: Keys, done: frozenset[str]) -> None:
    """Raises `CheckpointError` for metadata that changes the model in a way that is not done."""
    if keys.maybe("attention.causal") is False:
        raise keys.refused("attention.causal", "False")
    for name, neutral in NEUTRAL.items():
        value = None if name in done else keys.maybe(name)
        if value is not None and float(value) != neutral:
            raise keys.refused(name, value)
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        value = keys.maybe(name)
        if getattr(value, "size", 1) > 1 and len(set(map(int, value))) > 1:
            raise keys.refused(name, "different values for different layers")


NEUTRAL = {
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
"""Factors that must have no effect, unless the architecture's config does them."""
