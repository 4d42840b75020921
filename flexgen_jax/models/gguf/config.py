"""A GGUF file's metadata as the config.json of the model that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.gguf.container import GgufFile

Known = Callable[[str, Any], Any]


def config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the config; raises `CheckpointError` for an architecture that is not read, or if
    something that it needs is missing."""
    architecture = str(file.metadata.get("general.architecture", ""))
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}. Get the model as safetensors"
        )
    keys = _Keys(file, architecture)
    config = _common(keys) | ARCHITECTURES[architecture](keys)
    if "output.weight" not in file.tensors:
        config["tie_word_embeddings"] = True
    return {name: value for name, value in config.items() if value is not None}


class _Keys:
    """Metadata of an architecture, whose names begin with its own."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.metadata, self._begin = file, file.metadata, architecture

    def maybe(self, name: str) -> Any:
        return self.metadata.get(f"{self._begin}.{name}")

    def need(self, name: str) -> Any:
        value = self.maybe(name)
        if value is None:
            raise CheckpointError(
                f"{self.file.path}: its metadata has no {self._begin}.{name}; convert it again"
            )
        return value

    def special(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}_token_id")


def _common(keys: _Keys) -> dict[str, Any]:
    shapes = [keys.file.tensors[n].shape for n in ("token_embd.weight",) if n in keys.file.tensors]
    if not shapes:
        raise CheckpointError(f"{keys.file.path}: tensor 'token_embd.weight' is missing")
    return {
        "vocab_size": shapes[0][0],
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": keys.need("block_count"),
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
        "rope_parameters": _rope(keys),
    }


def _rope(keys: _Keys) -> dict[str, Any]:
    """Returns the rotary embeddings; factors of frequencies, which files have for LLaMA 3, are
    those of "longrope" with one kind of length."""
    theta = float(keys.maybe("rope.freq_base") or 10000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    scaling_type, length = keys.maybe("rope.scaling.type"), keys.need("context_length")
    factors = keys.file.tensors.get("rope_freqs.weight")
    if factors is not None:
        stored = keys.file.bytes[factors.begin : factors.begin + factors.nbytes]
        factor_list = [float(factor) for factor in stored.view("<f4")]
        return rope | {
            "rope_type": "longrope",
            "short_factor": factor_list,
            "long_factor": factor_list,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if scaling_type in ("linear", "yarn"):
        rope |= {"rope_type": scaling_type, "factor": float(keys.need("rope.scaling.factor"))}
        original = keys.maybe("rope.scaling.original_context_length")
        if scaling_type == "yarn" and original:
            rope["original_max_position_embeddings"] = original
    elif scaling_type not in (None, "none"):
        raise CheckpointError(f"{keys.file.path}: rope scaling {scaling_type!r} is not supported")
    return rope


def _llama(keys: _Keys) -> dict[str, Any]:
    experts = keys.maybe("expert_count")
    size = keys.maybe("rope.dimension_count")
    extra_fields = {"head_dim": keys.maybe("attention.key_length") or size, "mlp_bias": False}
    extra_fields["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
    if not experts:
        return extra_fields | {"model_type": "llama"}
    return extra_fields | {
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": keys.need("expert_used_count"),
    }


def _qwen2(_keys: _Keys) -> dict[str, Any]:
    return {"model_type": "qwen2"}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return {"model_type": "qwen3", "head_dim": keys.need("attention.key_length")}


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "head_dim": keys.need("attention.key_length"),
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma3(keys: _Keys) -> dict[str, Any]:
    """Five layers in six have a window, and the usual frequencies."""
    layers, size = keys.need("block_count"), keys.need("attention.key_length")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    rope = _rope(keys)
    return {
        "model_type": "gemma3_text",
        "head_dim": size,
        "sliding_window": keys.need("attention.sliding_window"),
        # The largest model alone scales queries by another number than the size of a head.
        "query_pre_attn_scalar": hidden // heads if layers == 62 else size,
        "layer_types": [
            "full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)
        ],
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": keys.maybe("rope.freq_base") or 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "hidden_activation": "gelu_pytorch_tanh",
    }


ARCHITECTURES: Mapping[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
}
