"""Compares the greedy tokens of a small model of each kind with those that a CPU has chosen.

    python scripts/checks/check_tokens.py            # on any machine
    python scripts/checks/check_tokens.py --write    # on a CPU, after a model here has changed

The models have random weights, in fp32; their tokens are in `tokens.json`. A token is not compared
if the second best one is within 1e-3, since the order of a sum may decide between the two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flexgen_jax import LLM, Policy, SamplingParams

FILE = Path(__file__).with_name("tokens.json")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
}
RECURRENT = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 64,
    **EXPERTS,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "latent": {"model_type": "deepseek_v3", **LATENT},
    "recurrent": {"model_type": "qwen3_next", **RECURRENT},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2},
}
PERCENTS = ((100, 0, 100, 0, 100, 0), (0, 100, 0, 100, 0, 100))
CLOSE = 1e-3


def answers(name: str, percent: tuple[int, ...]) -> list[dict[str, list[float]]]:
    """Returns each prompt's tokens, and how far the second best token is behind each."""
    prompts = np.random.default_rng(0).integers(3, 500, (4, 40)).tolist()
    params = SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    policy = Policy.from_percent(*percent, batch_size=2, num_batches=2)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**SIZES, **MODELS[name]}))
        with LLM(folder, dummy_weights=True, dtype="float32", policy=policy, unified=False) as llm:
            results = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    found = []
    for result in results:
        best = [sorted((x for _, x in token.top), reverse=True) for token in result.logprobs or ()]
        margins = [round(first - second, 5) for first, second, *_ in best]
        found.append({"tokens": list(result.token_ids), "margins": margins})
    return found


def are_equal(expected: dict[str, list[float]], found: dict[str, list[float]]) -> bool:
    """Returns whether tokens are equal up to the first that was chosen by a hair."""
    sure = next((n for n, x in enumerate(expected["margins"]) if x < CLOSE), None)
    return expected["tokens"][:sure] == found["tokens"][:sure]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="Write the file.")
    if parser.parse_args().write:
        FILE.write_text(json.dumps({name: answers(name, PERCENTS[0]) for name in MODELS}) + "\n")
        return
    expected, has_failed = json.loads(FILE.read_text()), False
    for name in MODELS:
        for percent in PERCENTS:
            pairs = zip(expected[name], answers(name, percent), strict=True)
            is_right = all(are_equal(*pair) for pair in pairs)
            print(f"{name}, {percent}: {'equal' if is_right else 'other tokens'}", flush=True)
            has_failed |= not is_right
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
