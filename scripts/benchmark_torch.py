"""The PyTorch reference: transformers, in memory or with Accelerate's disk offload.

    python scripts/benchmark_torch.py --model facebook/opt-1.3b --offload disk --batch-size 32 \
        --prompt-len 128 --gen-len 32 --folder /ssd/reference --json reference.json

The model has random bf16 weights, written once to --folder as an ordinary checkpoint, and is
loaded the way its users do, with a device map.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, OPTConfig

from flexgen_jax.families import family_of, known_shape


def write_checkpoint(name: str, folder: Path) -> Path:
    """A random bf16 checkpoint of a known shape, one shard a layer, unless it is there."""
    target = folder / name.replace("/", "--")
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config = known_shape(name)
    raw = family_of(config).write_config(config) | {"torch_dtype": "bfloat16"}
    with init_empty_weights():
        shapes = AutoModelForCausalLM.from_config(OPTConfig(**raw)).state_dict()
    shards: dict[str, dict[str, torch.Size]] = {}
    for key, tensor in shapes.items():
        if key == "lm_head.weight":
            continue
        part = key.split(".layers.")[1].split(".")[0] if ".layers." in key else "ends"
        shards.setdefault(part, {})[key] = tensor.shape
    where = {}
    for part, tensors in shards.items():
        file = f"model-{part}.safetensors"
        random = {k: torch.randn(s, dtype=torch.bfloat16) * 0.02 for k, s in tensors.items()}
        save_file(random, target / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": where}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_text(json.dumps(raw))
    return target


def load(path: Path, offload: str, folder: Path) -> Any:
    """The model with its decoder layers in RAM or on disk; the two ends are in RAM."""
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if offload != "none":
        raw = json.loads((path / "config.json").read_text())
        device_map: dict[str, str] = {
            f"model.decoder.layers.{i}": offload for i in range(raw["num_hidden_layers"])
        }
        ends = ("embed_tokens", "embed_positions", "final_layer_norm", "project_in", "project_out")
        device_map |= {f"model.decoder.{end}": "cpu" for end in ends}
        device_map["lm_head"] = "cpu"
        options |= {"device_map": device_map, "offload_folder": str(folder / "accelerate")}
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--offload", choices=["none", "disk"], default="disk")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--write-only", action="store_true", help="Only write the checkpoint.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = write_checkpoint(args.model, args.folder)
    if args.write_only:
        return
    model = load(path, args.offload, args.folder)
    torch.manual_seed(0)
    ids = torch.randint(4, model.config.vocab_size, (args.batch_size, args.prompt_len))

    def generate(tokens: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        assert out.shape[1] == args.prompt_len + tokens
        return time.perf_counter() - started

    if args.offload == "none":
        generate(2)
    total = generate(args.gen_len)
    report = {
        "model": args.model,
        "offload": args.offload,
        "batch_size": args.batch_size,
        "prompt_len": args.prompt_len,
        "gen_len": args.gen_len,
        "total_s": total,
        "generation_throughput": args.batch_size * args.gen_len / total,
        "torch": torch.__version__,
    }
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
