"""Tiny random models of every family that transformers makes and saves."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.models import BASE as OPT_BASE
from tests.helpers.models import byte_tokenizer, prompts

NEW_TOKENS = 16

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LLAMA3 = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=24,
)
LONG = {"factor": 4.0, "original_max_position_embeddings": 24}
LONGROPE = rope(
    "longrope",
    partial_rotary_factor=0.5,
    short_factor=[1.0, 1.5],
    long_factor=[2.0, 4.0],
)
MIXED_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
GLM = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
CONVOLUTIONS = ["conv", "full_attention", "conv"]
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
INDEXER = {"index_topk": 96, "index_head_dim": 16, "index_n_heads": 2}
MISTRAL4_ROPE = rope(
    "yarn",
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
    beta_fast=32.0,
    beta_slow=1.0,
    factor=4.0,
    original_max_position_embeddings=8,
)
OLMO3_ROPE = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, **LONG},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

VARIANTS: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "opt": ("OPT", (OPT_BASE, OPT_BASE | {"tie_word_embeddings": False})),
    "llama": ("Llama", ({}, {"attention_bias": True, "mlp_bias": True, **LLAMA3})),
    "llama-yarn": ("Llama", (rope("yarn", **LONG), {**rope("linear", factor=4.0), "head_dim": 12})),
    "llama-dynamic": ("Llama", (rope("dynamic", factor=2.0), {"num_key_value_heads": 1})),
    "mistral": ("Mistral", ({"sliding_window": 7}, {"sliding_window": None, "head_dim": 16})),
    "qwen2": (
        "Qwen2",
        ({}, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ),
    "qwen3": ("Qwen3", ({"head_dim": 16}, {"head_dim": 16, "tie_word_embeddings": True})),
    "phi3": (
        "Phi3",
        (
            {"original_max_position_embeddings": 40, **LONGROPE},
            {"num_key_value_heads": 4, "sliding_window": 9},
        ),
    ),
    "gemma2": (
        "Gemma2",
        (
            {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 3.0},
            {"head_dim": 8, "query_pre_attn_scalar": 16, "final_logit_softcapping": None},
        ),
    ),
    "gemma3_text": (
        "Gemma3",
        (
            {
                "head_dim": 16,
                "sliding_window": 7,
                "layer_types": MIXED_TYPES,
                "rope_parameters": GEMMA3_ROPE,
            },
            {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
        ),
    ),
    "gpt_neox": (
        "GPTNeoX",
        ({"num_key_value_heads": 4}, {"use_parallel_residual": False, "rotary_pct": 1.0}),
    ),
    "olmo2": ("Olmo2", ({}, {"attention_bias": True, "tie_word_embeddings": True})),
    "olmo3": (
        "Olmo3",
        (
            {"sliding_window": 7},
            {"sliding_window": 5, "layer_types": MIXED_TYPES, "rope_parameters": OLMO3_ROPE},
        ),
    ),
    "smollm3": (
        "SmolLM3",
        (
            {"no_rope_layer_interval": 2},
            {
                "no_rope_layers": [1, 0, 1],
                "use_sliding_window": True,
                "sliding_window": 6,
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": False,
            },
        ),
    ),
    "starcoder2": ("Starcoder2", ({}, {"use_bias": False, "sliding_window": 7})),
    "mixtral": (
        "Mixtral",
        ({"num_local_experts": 4}, {"num_local_experts": 5, "sliding_window": 7}),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        (
            EXPERTS | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
            EXPERTS | {"shared_expert_intermediate_size": 16, "norm_topk_prob": True},
        ),
    ),
    "glm4_moe": (
        "Glm4Moe",
        (
            GLM | {"head_dim": 16, "routed_scaling_factor": 2.5},
            GLM
            | {
                "head_dim": 8,
                "n_group": 3,
                "topk_group": 2,
                "n_shared_experts": 2,
                "first_k_dense_replace": 2,
                "use_qk_norm": True,
                "attention_bias": True,
                "norm_topk_prob": False,
                "partial_rotary_factor": 1.0,
            },
        ),
    ),
    "hy_v3": (
        "HYV3",
        (
            EXPERTS | {"head_dim": 16},
            EXPERTS
            | {
                "head_dim": 8,
                "num_shared_experts": 2,
                "attention_bias": True,
                "mlp_bias": True,
                "router_scaling_factor": 1.5,
                "mlp_layer_types": ["sparse", "dense", "sparse"],
            },
        ),
    ),
    "gpt_oss": (
        "GptOss",
        (
            {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7},
            {
                "num_local_experts": 5,
                "num_experts_per_tok": 3,
                "head_dim": 8,
                "sliding_window": 4,
                "swiglu_limit": 1.0,
                "attention_bias": False,
                "layer_types": MIXED_TYPES,
                **rope("yarn", truncate=False, **LONG),
            },
        ),
    ),
    "minimax_m2": (
        "MiniMaxM2",
        (
            {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
            {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 8},
        ),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        (
            GLM | LATENT | {"n_shared_experts": 1, "first_k_dense_replace": 1},
            GLM
            | LATENT
            | {
                "q_lora_rank": None,
                "topk_method": "group_limited_greedy",
                "n_group": 3,
                "topk_group": 2,
                "attention_bias": True,
                "routed_scaling_factor": 2.0,
                **rope("yarn", mscale=1.0, mscale_all_dim=0.7, **LONG),
            },
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        (
            GLM | LATENT | {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
            GLM
            | LATENT
            | {
                "q_lora_rank": None,
                "n_group": 1,
                "topk_group": 1,
                "rope_interleave": False,
                "attention_bias": True,
                "norm_topk_prob": False,
                "n_shared_experts": 2,
                "first_k_dense_replace": 0,
                "v_head_dim": 20,
                **rope("yarn", mscale=1.0, mscale_all_dim=1.0, **LONG),
            },
        ),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        (
            GLM | LATENT | {"v_head_dim": 24},
            GLM | LATENT | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 2},
        ),
    ),
    "mistral4": (
        "Mistral4",
        (
            GLM | LATENT | MISTRAL4_ROPE,
            GLM | LATENT | {"q_lora_rank": None, "n_group": 2, "topk_group": 1},
        ),
    ),
    "deepseek_v32": (
        "DeepseekV32",
        (
            GLM | LATENT | INDEXER | {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
            GLM
            | LATENT
            | INDEXER
            | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        ),
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        (
            GLM | LATENT | INDEXER | {"first_k_dense_replace": 1},
            GLM | LATENT | INDEXER | {"first_k_dense_replace": 0, "v_head_dim": 24},
        ),
    ),
    "kimi_k25": (
        "Kimi_K25",
        (
            {
                "model_type": "deepseek_v3",
                **GLM,
                **LATENT,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
            },
            {
                "model_type": "deepseek_v3",
                **GLM,
                **LATENT,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 0,
            },
        ),
    ),
    "ministral3": (
        "Ministral3",
        (
            {"head_dim": 16, **MISTRAL4_ROPE},
            {"head_dim": 8, "sliding_window": 7, "tie_word_embeddings": True},
        ),
    ),
    "mistral3": (
        "Mistral3",
        (
            {"model_type": "ministral3", "head_dim": 8, **MISTRAL4_ROPE},
            {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        ),
    ),
    "qwen3_vl": (
        "Qwen3VL",
        ({"head_dim": 16}, {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        (
            EXPERTS | {"head_dim": 16, "moe_intermediate_size": 12, "tie_word_embeddings": False},
            EXPERTS
            | {
                "head_dim": 8,
                "moe_intermediate_size": 20,
                "mlp_only_layers": [1],
                "tie_word_embeddings": True,
            },
        ),
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        (
            {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16},
            {
                "moe_num_experts": 5,
                "moe_k": 3,
                "moe_intermediate_size": 8,
                "moe_num_shared_experts": 0,
                "moe_layer_start_index": 0,
                "moe_layer_interval": 2,
                "moe_norm_min": 0.9,
                "tie_word_embeddings": False,
            },
        ),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        (
            EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
            EXPERTS | {"head_dim": 8, "mlp_only_layers": [1]},
        ),
    ),
    "qwen3_next": (
        "Qwen3Next",
        (
            EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 16},
            EXPERTS
            | DELTA_NET
            | {
                "shared_expert_intermediate_size": 8,
                "num_hidden_layers": 4,
                "layer_types": None,
                "mlp_only_layers": [1],
                "attention_bias": True,
                "norm_topk_prob": False,
                "linear_conv_kernel_dim": 3,
                "linear_num_value_heads": 2,
                "tie_word_embeddings": True,
            },
        ),
    ),
    "qwen3_5": (
        "Qwen3_5",
        (
            DELTA_NET,
            DELTA_NET
            | {
                "linear_num_value_heads": 6,
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
        ),
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        (
            EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 16},
            EXPERTS
            | DELTA_NET
            | {"shared_expert_intermediate_size": 8, "linear_conv_kernel_dim": 2, "head_dim": 8},
        ),
    ),
    "ernie4_5": (
        "Ernie4_5",
        ({"head_dim": 16}, {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}),
    ),
    "seed_oss": (
        "SeedOss",
        (
            {"head_dim": 16},
            {
                "head_dim": 8,
                "attention_bias": False,
                "attention_out_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        ),
    ),
    "exaone4": (
        "Exaone4",
        (
            {"sliding_window": 6, "sliding_window_pattern": 2},
            {"sliding_window": None, "layer_types": ["full_attention"] * 3, **LLAMA3},
        ),
    ),
    "glm4": ("Glm4", ({"head_dim": 16}, {"head_dim": 8, "attention_bias": False})),
    "gemma": (
        "Gemma",
        ({"head_dim": 16}, {"head_dim": 8, "attention_bias": True, "hidden_act": "gelu"}),
    ),
    "lfm2": (
        "Lfm2",
        (
            {"layer_types": CONVOLUTIONS, "block_multiple_of": 16, "tie_word_embeddings": True},
            {
                "full_attn_idxs": [0],
                "conv_L_cache": 4,
                "block_auto_adjust_ff_dim": False,
                "tie_word_embeddings": False,
            },
        ),
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        (
            EXPERTS | {"layer_types": CONVOLUTIONS, "num_dense_layers": 1},
            EXPERTS
            | {
                "layer_types": CONVOLUTIONS[::-1],
                "num_dense_layers": 0,
                "use_expert_bias": False,
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.0,
            },
        ),
    ),
    "gemma4": (
        "Gemma4",
        (
            GEMMA4
            | {
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 2,
                "moe_intermediate_size": 16,
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
            },
            GEMMA4 | {"global_head_dim": 8, "final_logit_softcapping": 30.0, "sliding_window": 9},
        ),
    ),
}
"""The names of transformers' classes, and two variants of a config."""


QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
TOWERS: dict[str, dict[str, Any]] = {
    "Gemma4": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "head_dim": 8,
        "global_head_dim": 8,
        "patch_size": 4,
    },
    "Qwen3_5": QWEN_TOWER,
    "Qwen3_5Moe": QWEN_TOWER,
    "Qwen3VL": QWEN_TOWER,
    "Qwen3VLMoe": QWEN_TOWER,
    "Mistral3": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "image_size": 32,
        "patch_size": 16,
    },
    "Kimi_K25": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    },
}
"""The towers for pictures of the models that see, by the names of their classes."""


class Reference:
    """A tiny random model that transformers itself saved. more: fields of its config."""

    def __init__(self, folder: Path, family: str, variant: int, **more: Any) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        torch.set_num_threads(1)  # for tiny models more of them only get into each other's way
        name, variants = VARIANTS[family]
        text = "Text" if name == "Gemma3" else ""
        own = deepcopy(variants[variant])  # transformers writes into what it is given
        fields = BASE | own if family != "opt" else own
        make = getattr(transformers, f"{name}{text}Config")
        task = "CausalLM"
        if name in TOWERS:
            ids = {key: fields[key] for key in fields if key.endswith("token_id")}
            config = make(text_config=fields | more, vision_config=TOWERS[name], **ids)
            config.tie_word_embeddings = bool(fields.get("tie_word_embeddings"))
            task = "ConditionalGeneration"
        else:
            config = make(**fields | more)
        config._attn_implementation = "eager"
        self.model = getattr(transformers, f"{name}For{task}")(config).eval()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        for name, buffer in self.model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                torch.nn.init.normal_(buffer, std=0.3)
            if name.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.5, 1.5)
        self.model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
        self.folder = folder

    def logits(self, ids: list[int]) -> np.ndarray:
        """Returns the logits of all tokens, fp64 [token, vocabulary]."""
        import torch

        with torch.inference_mode():
            found: np.ndarray = self.model(torch.tensor([ids])).logits[0].double().numpy()
        return found

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The greedy tokens of every prompt of `tests.helpers.models.prompts`."""
        return [self.greedy(ids, NEW_TOKENS) for ids in prompts()]

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Returns the greedy tokens that follow a prompt: in prompts of recurrent layers by their
        chunked form, then by their recurrent one."""
        import torch

        self.model.generation_config.eos_token_id = None
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=1
        )
        tokens: list[int] = out[0, len(ids) :].tolist()
        return tokens

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Returns the log-probability of every token but the first."""
        logits = self.logits(ids[:-1] or ids)  # the last one only is scored
        logits = logits - logits.max(-1, keepdims=True)
        table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return table[np.arange(len(ids) - 1), ids[1:]]
