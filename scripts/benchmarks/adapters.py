"""Measures what LoRA adapters of all linear layers cost, in runs that alternate.

    python scripts/benchmarks/adapters.py --model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --sequences 1 8

Prints the time of prompts and of a decoding step: without adapters, with one for all texts, and
with three that the texts of a batch choose from.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.models.families import family_of
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec

PROMPT_LEN = 128


def write_adapter(folder: Path, model: str, rank: int, seed: int) -> None:
    """Writes an adapter of random numbers for a model's decoder layers."""
    config, generator = known_shape(model), np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for key, tensor in model_spec(config).tensors.items():
        if not key.startswith("decoder.") or not key.endswith(".kernel"):
            continue
        module = family_of(config).stored(tensor, config).name.removesuffix(".weight")
        rows, columns = tensor.shape
        for side, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            numbers = generator.normal(0, 0.02, shape).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = numbers
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "lora_alpha": rank})
    )


def measure(llms: dict[str, LLM], sequences: int, steps: int, repeats: int) -> None:
    """Prints the medians of runs of all models in turn; the first run of each compiles."""
    ids = np.random.default_rng(0).integers(3, 20000, (sequences, PROMPT_LEN)).tolist()
    params = SamplingParams(max_tokens=steps + 1, ignore_eos=True)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
    for repeat in range(repeats + 1):
        for name, llm in llms.items():
            names = llm.config.adapter_names
            chosen = [names[n % len(names)] for n in range(sequences)] if names else None
            llm.generate(prompt_token_ids=ids, sampling_params=params, adapter=chosen)
            report: Any = llm.report()
            if repeat:
                measured[name].append((report["prefill_s"], report["decode_s"] / steps))
    for name, runs in measured.items():
        prefill, step = (median(times) for times in zip(*runs, strict=True))
        print(f"{sequences} sequences, {name}: prompts {prefill:.3f} s, step {step * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--weight-bits", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"adapter{n}" for n in range(3)]
        for seed, path in enumerate(paths):
            write_adapter(path, options.model, options.rank, seed)
        given: dict[str, list[str]] = {
            "no adapter": [],
            "one adapter": [str(paths[0])],
            "three in a batch": [f"{path.name}={path}" for path in paths],
        }
        for sequences in options.sequences:
            policy = Policy(batch_size=sequences, num_batches=1, weight_bits=options.weight_bits)
            llms = {
                name: LLM(options.model, dummy_weights=True, policy=policy, adapter=adapters)
                for name, adapters in given.items()
            }
            measure(llms, sequences, options.steps, options.repeats)
            for llm in llms.values():
                llm.close()


if __name__ == "__main__":
    main()
