"""Shapes of known models by name, for random weights and for planning, without any file.

Each is the part of the model's published config.json that says how large it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import family_of, quantization_of, read_config
from flexgen_jax.models.formats.expected import expected
from flexgen_jax.models.parts import ConfigError
from flexgen_jax.models.spec_of_config import model_spec

Raw = Mapping[str, Any]


def _opt(hidden: int, layers: int, heads: int, **others: Any) -> Raw:
    """An OPT model (Zhang et al. 2022, table 1)."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {
        "model_type": "opt",
        "vocab_size": 50272,
        "ffn_dim": 4 * hidden,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": hidden,
        "dtype": "float16",
        **sizes,
        **others,
    }


def _like(model_type: str, sizes: tuple[int, ...], **others: Any) -> Raw:
    """A model of LLaMA's shape. sizes: hidden, feed-forward, layers, heads, heads of keys and
    values, vocabulary, context."""
    hidden, width, layers, heads, kv_heads, vocab, positions = sizes
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "dtype": "bfloat16",
        **others,
    }


_LLAMA3 = {"bos_token_id": 128000, "eos_token_id": 128001, "rope_theta": 500000.0}


def _long(factor: float) -> Raw:
    """What LLaMA 3.1 to 3.3 add to LLaMA 3."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {**_LLAMA3, "rope_scaling": scaling}


_CONTEXT = 131072
_QWEN = {"bos_token_id": 151643, "eos_token_id": 151645, "rope_theta": 1000000.0}
_QWEN3 = {**_QWEN, "head_dim": 128}
_TIED = {"tie_word_embeddings": True}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000.0}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_QWEN_NEXT = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN3_5 = {"eos_token_id": 248044, "rope_theta": 10000000.0}
_GEMMA4 = {
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
_PHI3 = {"eos_token_id": 32000, "pad_token_id": 32000}


def _pythia(hidden: int, layers: int, heads: int, vocab: int = 50304) -> Raw:
    return {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "dtype": "float16",
    }


def _gpt_oss(layers: int, experts: int) -> Raw:
    """A model of OpenAI's gpt-oss, with experts in MXFP4."""
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "embed_tokens", "lm_head"]
    return _like(
        "gpt_oss",
        (2880, 2880, layers, 64, 8, 201088, _CONTEXT),
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        eos_token_id=200002,
        pad_token_id=199999,
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": skipped},
    )


def _glm(sizes: tuple[int, ...], experts: int, width: int, dense: int, **others: Any) -> Raw:
    """A model of GLM-4.5 to 4.7."""
    return _like(
        "glm4_moe",
        sizes,
        head_dim=128,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=width,
        first_k_dense_replace=dense,
        attention_bias=True,
        rope_theta=1000000.0,
        partial_rotary_factor=0.5,
        eos_token_id=151329,
        **others,
    )


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}


def _deepseek_v3(model_type: str = "deepseek_v3", quantization: Raw = _FP8, **others: Any) -> Raw:
    """DeepSeek-V3, whose experts' router and head stay in 16 bits, or a model like it."""
    scaling = {**_YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return _like(
        model_type,
        (7168, 18432, 61, 128, 128, 129280, 163840),
        moe_intermediate_size=2048,
        rope_scaling=scaling,
        quantization_config=quantization,
        **others,
    )


def _kimi_k2(quantization: Raw, positions: int) -> Raw:
    """Kimi K2: DeepSeek-V3 with more experts, fewer heads and no groups."""
    scaling = {**_YARN, "factor": positions / 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    sizes = {"num_attention_heads": 64, "vocab_size": 163840, "max_position_embeddings": positions}
    return {
        **_deepseek_v3("kimi_k2", quantization),
        **sizes,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "rope_scaling": scaling,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
    }


_KIMI_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 32, "type": "int", "symmetric": True},
        }
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|down)_proj.*"],
}

SHAPES: Mapping[str, Raw] = {
    "facebook/opt-125m": _opt(768, 12, 12),
    "facebook/opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": _opt(2048, 24, 32),
    "facebook/opt-2.7b": _opt(2560, 32, 32),
    "facebook/opt-6.7b": _opt(4096, 32, 32),
    "facebook/opt-13b": _opt(5120, 40, 40),
    "facebook/opt-30b": _opt(7168, 48, 56),
    "facebook/opt-66b": _opt(9216, 64, 72),
    "facebook/opt-175b": _opt(12288, 96, 96),
    "HuggingFaceTB/SmolLM-135M": _like("llama", (576, 1536, 30, 9, 3, 49152, 2048), **_TIED),
    "HuggingFaceTB/SmolLM-360M": _like("llama", (960, 2560, 32, 15, 5, 49152, 2048), **_TIED),
    "HuggingFaceTB/SmolLM-1.7B": _like("llama", (2048, 8192, 24, 32, 32, 49152, 2048), **_TIED),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _like("llama", (2048, 5632, 22, 32, 4, 32000, 2048)),
    "meta-llama/Llama-2-7b-hf": _like("llama", (4096, 11008, 32, 32, 32, 32000, 4096)),
    "meta-llama/Llama-2-13b-hf": _like("llama", (5120, 13824, 40, 40, 40, 32000, 4096)),
    "meta-llama/Llama-2-70b-hf": _like("llama", (8192, 28672, 80, 64, 8, 32000, 4096)),
    "meta-llama/Meta-Llama-3-8B": _like("llama", (4096, 14336, 32, 32, 8, 128256, 8192), **_LLAMA3),
    "meta-llama/Meta-Llama-3-70B": _like(
        "llama", (8192, 28672, 80, 64, 8, 128256, 8192), **_LLAMA3
    ),
    "meta-llama/Llama-3.1-8B": _like(
        "llama", (4096, 14336, 32, 32, 8, 128256, _CONTEXT), **_long(8.0)
    ),
    "meta-llama/Llama-3.1-70B": _like(
        "llama", (8192, 28672, 80, 64, 8, 128256, _CONTEXT), **_long(8.0)
    ),
    "meta-llama/Llama-3.1-405B": _like(
        "llama", (16384, 53248, 126, 128, 8, 128256, _CONTEXT), **_long(8.0)
    ),
    "meta-llama/Llama-3.2-1B": _like(
        "llama", (2048, 8192, 16, 32, 8, 128256, _CONTEXT), head_dim=64, **_TIED, **_long(32.0)
    ),
    "meta-llama/Llama-3.2-3B": _like(
        "llama", (3072, 8192, 28, 24, 8, 128256, _CONTEXT), head_dim=128, **_TIED, **_long(32.0)
    ),
    "meta-llama/Llama-3.3-70B-Instruct": _like(
        "llama", (8192, 28672, 80, 64, 8, 128256, _CONTEXT), **_long(8.0)
    ),
    "deepseek-ai/deepseek-llm-67b-base": _like(
        "llama", (8192, 22016, 95, 64, 8, 102400, 4096), bos_token_id=100000, eos_token_id=100001
    ),
    "01-ai/Yi-34B": _like("llama", (7168, 20480, 60, 56, 8, 64000, 4096), rope_theta=5000000.0),
    "mistralai/Mistral-7B-v0.1": _like(
        "mistral", (4096, 14336, 32, 32, 8, 32000, 32768), sliding_window=4096
    ),
    "mistralai/Mistral-7B-v0.3": _like(
        "mistral",
        (4096, 14336, 32, 32, 8, 32768, 32768),
        rope_theta=1000000.0,
        sliding_window=None,
    ),
    "Qwen/Qwen2.5-0.5B": _like("qwen2", (896, 4864, 24, 14, 2, 151936, 32768), **_TIED, **_QWEN),
    "Qwen/Qwen2.5-1.5B": _like(
        "qwen2", (1536, 8960, 28, 12, 2, 151936, _CONTEXT), **_TIED, **_QWEN
    ),
    "Qwen/Qwen2.5-7B": _like("qwen2", (3584, 18944, 28, 28, 4, 152064, _CONTEXT), **_QWEN),
    "Qwen/Qwen2.5-32B": _like("qwen2", (5120, 27648, 64, 40, 8, 152064, _CONTEXT), **_QWEN),
    "Qwen/Qwen2-72B": _like("qwen2", (8192, 29568, 80, 64, 8, 152064, _CONTEXT), **_QWEN),
    "Qwen/Qwen3-0.6B": _like("qwen3", (1024, 3072, 28, 16, 8, 151936, 40960), **_TIED, **_QWEN3),
    "Qwen/Qwen3-8B": _like("qwen3", (4096, 12288, 36, 32, 8, 151936, 40960), **_QWEN3),
    "Qwen/Qwen3-32B": _like("qwen3", (5120, 25600, 64, 64, 8, 151936, 40960), **_QWEN3),
    "microsoft/Phi-3-mini-4k-instruct": _like(
        "phi3", (3072, 8192, 32, 32, 32, 32064, 4096), sliding_window=2047, **_PHI3
    ),
    "microsoft/Phi-3-medium-4k-instruct": _like(
        "phi3", (5120, 17920, 40, 40, 10, 32064, 4096), sliding_window=2047, **_PHI3
    ),
    "google/gemma-2-2b": _like("gemma2", (2304, 9216, 26, 8, 4, 256000, 8192), head_dim=256),
    "google/gemma-2-9b": _like("gemma2", (3584, 14336, 42, 16, 8, 256000, 8192), head_dim=256),
    "google/gemma-2-27b": _like(
        "gemma2",
        (4608, 36864, 46, 32, 16, 256000, 8192),
        head_dim=128,
        query_pre_attn_scalar=144,
    ),
    "google/gemma-3-1b-pt": _like(
        "gemma3_text", (1152, 6912, 26, 4, 1, 262144, 32768), head_dim=256, sliding_window=512
    ),
    "google/gemma-3-27b-pt": _like(
        "gemma3_text",
        (5376, 21504, 62, 32, 16, 262208, _CONTEXT),
        head_dim=128,
        sliding_window=1024,
        query_pre_attn_scalar=168,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "EleutherAI/pythia-160m": _pythia(768, 12, 12),
    "EleutherAI/pythia-1.4b": _pythia(2048, 24, 16),
    "EleutherAI/pythia-6.9b": _pythia(4096, 32, 32, 50432),
    "EleutherAI/gpt-neox-20b": _pythia(6144, 44, 64, 50432),
    "mistralai/Mixtral-8x7B-v0.1": _like(
        "mixtral", (4096, 14336, 32, 32, 8, 32000, 32768), **_MIXTRAL
    ),
    "mistralai/Mixtral-8x22B-v0.1": _like(
        "mixtral", (6144, 16384, 56, 48, 8, 32000, 65536), **_MIXTRAL
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": _like(
        "qwen2_moe",
        (2048, 5632, 24, 16, 16, 151936, 8192),
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        **_QWEN,
    ),
    "Qwen/Qwen3-30B-A3B": _like(
        "qwen3_moe",
        (2048, 6144, 48, 32, 4, 151936, 40960),
        moe_intermediate_size=768,
        **_QWEN3_MOE,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _like(
        "qwen3_next",
        (2048, 5120, 48, 16, 2, 151936, 262144),
        **_QWEN_NEXT | {"num_experts": 512, "num_experts_per_tok": 10, "rope_theta": 10000000.0},
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    "Qwen/Qwen3.5-27B": _like(
        "qwen3_5_text",
        (5120, 17408, 64, 24, 4, 248320, 262144),
        **_QWEN3_5,
        linear_num_value_heads=48,
    ),
    "Qwen/Qwen3.6-35B-A3B": _like(
        "qwen3_5_moe_text", (2048, 512, 40, 16, 2, 248320, 262144), **_QWEN_NEXT, **_QWEN3_5
    ),
    "google/gemma-4-26B-A4B-it": _like(
        "gemma4_text",
        (2816, 2112, 30, 16, 8, 262144, 262144),
        **_GEMMA4,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "google/gemma-4-31B-it": _like(
        "gemma4_text",
        (5376, 21504, 60, 32, 16, 262144, 262144),
        **_GEMMA4,
        num_global_key_value_heads=4,
    ),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "zai-org/GLM-4.5-Air": _glm(
        (4096, 10944, 46, 96, 8, 151552, _CONTEXT), 128, 1408, 1, routed_scaling_factor=1.0
    ),
    "zai-org/GLM-4.6": _glm(
        (5120, 12288, 92, 96, 8, 151552, 202752),
        160,
        1536,
        3,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "MiniMaxAI/MiniMax-M2": _like(
        "minimax_m2",
        (3072, 1536, 62, 48, 8, 200064, 196608),
        head_dim=128,
        rotary_dim=64,
        num_local_experts=256,
        num_experts_per_tok=8,
        rope_theta=5000000.0,
        quantization_config={
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
    ),
    "deepseek-ai/DeepSeek-V2-Lite": _like(
        "deepseek_v2",
        (2048, 10944, 27, 16, 16, 102400, 163840),
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        first_k_dense_replace=1,
        rope_scaling={**_YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-ai/DeepSeek-V2": _like(
        "deepseek_v2",
        (5120, 12288, 60, 128, 128, 102400, 163840),
        moe_intermediate_size=1536,
        n_routed_experts=160,
        num_experts_per_tok=6,
        n_shared_experts=2,
        first_k_dense_replace=1,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
        rope_scaling={**_YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-ai/DeepSeek-V3": _deepseek_v3(),
    "deepseek-ai/DeepSeek-R1": _deepseek_v3(),
    "deepseek-ai/DeepSeek-V3.2": _deepseek_v3("deepseek_v32", index_topk=2048),
    "moonshotai/Kimi-K2-Instruct": _kimi_k2(_FP8, 131072),
    "moonshotai/Kimi-K2-Thinking": _kimi_k2(_KIMI_INT4, 262144),
    "zai-org/GLM-4.7-Flash": _like(
        "glm4_moe_lite",
        (2048, 10240, 47, 20, 20, 154880, 202752),
        moe_intermediate_size=1536,
        rope_theta=1000000.0,
    ),
    "zai-org/GLM-5": _like(
        "glm_moe_dsa",
        (6144, 12288, 78, 64, 64, 154880, 202752),
        moe_intermediate_size=2048,
        rope_theta=1000000.0,
        index_topk=2048,
    ),
    "mistralai/Mistral-Small-4-119B-2603": _like(
        "mistral4", (4096, 12288, 36, 32, 32, 131072, 1048576), moe_intermediate_size=2048
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": _like(
        "mistral3",
        (5120, 32768, 40, 32, 8, 131072, 131072),
        head_dim=128,
        rope_theta=1000000000.0,
    ),
    "mistralai/Ministral-3-8B-Instruct-2512": _like(
        "ministral3", (4096, 14336, 34, 32, 8, 131072, 262144)
    ),
    "baidu/ERNIE-4.5-21B-A3B-PT": _like(
        "ernie4_5_moe",
        (2560, 12288, 28, 20, 4, 103424, _CONTEXT),
        moe_intermediate_size=1536,
        moe_num_experts=64,
        moe_k=6,
        moe_num_shared_experts=2,
        **_TIED,
    ),
    "Qwen/Qwen3-VL-8B-Instruct": _like(
        "qwen3_vl", (4096, 12288, 36, 32, 8, 151936, 262144), **_QWEN3
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": _like(
        "qwen3_vl_moe",
        (2048, 6144, 48, 32, 4, 151936, 262144),
        moe_intermediate_size=768,
        **_QWEN3_MOE,
    ),
    "HuggingFaceTB/SmolLM3-3B": _like(
        "smollm3", (2048, 11008, 36, 16, 4, 128256, 65536), rope_theta=5000000.0, **_TIED
    ),
    "allenai/Olmo-3-1025-7B": _like(
        "olmo3",
        (4096, 11008, 32, 32, 32, 100278, 65536),
        sliding_window=4096,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2079441541679836,
            "original_max_position_embeddings": 8192,
        },
    ),
    "Qwen/Qwen3-235B-A22B": _like(
        "qwen3_moe",
        (4096, 12288, 94, 64, 4, 151936, 40960),
        moe_intermediate_size=1536,
        **_QWEN3_MOE,
    ),
}


def raw_shape(name: str) -> Raw:
    """Returns the config of a known model in Hugging Face's spelling, by its hub id or the part
    after the slash. Raises `ConfigError` for any other name."""
    names = {full.lower(): full for full in SHAPES}
    names |= {full.split("/")[1].lower(): full for full in SHAPES}
    full = names.get(name.lower())
    if full is None:
        close = difflib.get_close_matches(name.lower(), names, 1)
        hint = f"did you mean {names[close[0]]}? " if close else ""
        raise ConfigError(
            f"unknown shape {name!r}; {hint}`flexgen-jax models` lists the known shapes"
        )
    return SHAPES[full]


def known_shape(name: str) -> ModelConfig:
    """Returns the config of a known model in its published formats, without any file; see
    `raw_shape`."""
    raw = raw_shape(name)
    return with_formats(read_config(raw), quantization_of(raw))


def with_formats(config: ModelConfig, options: Mapping[str, Any]) -> ModelConfig:
    """Returns a config with the formats that its "quantization_config", `options`, promises."""
    family = family_of(config)
    published = expected(
        options, model_spec(config), lambda tensor: family.stored(tensor, config).name
    )
    return replace(config, published=published)
