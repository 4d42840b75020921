"""Tiny random checkpoints of every OPT variant, written with NumPy in Hugging Face's spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.models.families import OPT, read_config
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tokenizer import Tokenizer
from tests.helpers.cases import chosen_few

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
"""A chat template that writes roles in brackets."""

BASE: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "max_position_embeddings": 96,
    "word_embed_proj_dim": 32,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
    "_remove_final_layer_norm": False,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "dropout": 0.0,
    "torch_dtype": "float32",
}

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "no-final-norm": {"_remove_final_layer_norm": True},
    "untied": {"tie_word_embeddings": False},
    "no-bias": {"enable_bias": False},
    "no-affine": {"layer_norm_elementwise_affine": False},
    "galactica": {"activation_function": "gelu"},
}

PLACEMENTS = (
    (100, 0, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (30, 40, 20, 50, 0, 100),
)

SPLITS = ((100, 0), (0, 100), (0, 0), (30, 40))
"""Percent of weights, cache or hidden states on the device and the host: all in one tier, or in
all."""

TIER_PLACEMENTS = tuple(
    tuple(chain.from_iterable(SPLITS[index] for index in choice))
    for choice in dict.fromkeys([(0,) * 3, (1,) * 3, (2,) * 3, *chosen_few([4] * 3, 2)])
)
"""Everything in each tier alone, and mixtures that have every pair of `SPLITS`."""

PROMPT_LENGTHS = (3, 14, 8, 16, 5, 9, 12, 1)
"""All are padded to one length, so that a run compiles few programs."""

SHORT = SamplingParams(max_tokens=10, ignore_eos=True)


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, BASE["vocab_size"], n).tolist() for n in lengths]


def run_greedy(
    folder: Path,
    params: SamplingParams,
    policy: Policy,
    lengths: tuple[int, ...] = PROMPT_LENGTHS,
    **options: Any,
) -> list[list[int]]:
    """Returns every prompt's tokens in fp32; checks that no tier exceeds its computed peak."""
    with LLM(folder, dtype="float32", policy=policy, **options) as llm:
        results = llm.generate(prompt_token_ids=prompts(lengths), sampling_params=params)
        report = llm.report()
    assert_within_plan(report)
    return [result.token_ids for result in results]


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tensors, spread widely enough that greedy tokens vary."""
    rng = np.random.default_rng(seed)
    tensors = {}
    model = read_config(config)
    for key, spec in model_spec(model).tensors.items():
        values = rng.normal(0, 0.2, spec.shape)
        if key.endswith("scale"):
            values += 1.0
        tensors["model." + OPT.stored(spec, model).name] = values.astype(np.float32)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors.pop("model.lm_head.weight")
    return tensors


def write_checkpoint(folder: Path, variant: str = "base", **changes: Any) -> Path:
    """Writes a whole model folder: config, tokenizer and random weights."""
    config = BASE | VARIANTS[variant] | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    save_file(random_tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokenizer_with(folder: Path, marks: Sequence[str], plain: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of bytes that also has these marks, with ids from 1000 on; those that `plain`
    names are ordinary tokens, the others special ones."""
    content = byte_tokenizer()
    content["added_tokens"] += [
        {
            "id": 1000 + number,
            "content": mark,
            "special": mark not in plain,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, mark in enumerate(marks)
    ]
    content["model"]["vocab"] |= {mark: 1000 + n for n, mark in enumerate(marks)}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "config.json").write_text("{}")
    return Tokenizer(folder, None)


def byte_tokenizer() -> dict[str, Any]:
    """Returns a tokenizer.json of 96 tokens: four special ones and printable characters."""
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    vocab |= {chr(i): i - 28 for i in range(32, 124)}
    special = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, i in list(vocab.items())[:4]
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }


def assert_within_plan(report: Mapping[str, Any]) -> None:
    """Checks that a run needed no more bytes of any tier than were planned."""
    for tier, peak in report["peak_bytes"].items():
        planned = report["computed_peak_bytes"][tier]
        assert peak <= planned, f"{tier}: {peak} bytes instead of {planned}"
