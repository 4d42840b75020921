"""The PyTorch reference: transformers, in memory or offloaded by Accelerate or DeepSpeed.

    python scripts/benchmarks/torch_reference.py --model facebook/opt-1.3b --offload disk \
        --batch-size 32 --prompt-len 128 --gen-len 32 --folder /ssd/reference --json reference.json

The model has random weights, written once in bf16 to --folder as an ordinary checkpoint, and is
loaded the way its users do. --offload:

  none    everything on the device
  cpu     decoder layers in RAM, computed on the GPU
  disk    decoder layers on disk
  auto    Accelerate's device_map="auto" within --device-memory and --host-memory
  zero    DeepSpeed ZeRO-Inference, parameters in RAM (GPU only)
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from flexgen_jax.models.shapes import raw_shape


def write_checkpoint(name: str, folder: Path) -> Path:
    """Writes a random bf16 checkpoint of a known shape, one shard per layer, unless it exists."""
    target = folder / name.replace("/", "--")
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    raw = {**raw_shape(name), "dtype": "bfloat16"}
    with init_empty_weights():
        config = AutoConfig.for_model(**raw)
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
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


def load(path: Path, args: argparse.Namespace) -> Any:
    """Loads the model, placed as --offload says; the embeddings stay where the layers are
    computed."""
    options: dict[str, Any] = {"dtype": getattr(torch, args.dtype)}
    if args.offload == "zero":
        return with_deepspeed(AutoModelForCausalLM.from_pretrained(path, **options))
    home: int | str = 0 if args.device == "cuda" else "cpu"
    if args.offload in ("cpu", "disk"):
        raw = json.loads((path / "config.json").read_text())
        layers = [f"model.decoder.layers.{i}" for i in range(raw["num_hidden_layers"])]
        ends = ("embed_tokens", "embed_positions", "final_layer_norm", "project_in", "project_out")
        device_map: dict[str, int | str] = dict.fromkeys(layers, args.offload)
        device_map |= {f"model.decoder.{end}": home for end in ends}
        options |= {"device_map": device_map | {"lm_head": home}}
    elif args.offload == "auto":
        limits: dict[int | str, int] = {"cpu": args.host_memory or free_memory()}
        if args.device == "cuda":  # a third is left for the KV cache
            limits[0] = (args.device_memory or torch.cuda.mem_get_info()[0]) * 2 // 3
        options |= {"device_map": "auto", "max_memory": limits}
    else:
        options |= {"device_map": home}
    if args.offload in ("disk", "auto"):
        options |= {"offload_folder": str(args.folder / "accelerate")}
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def free_memory() -> int:
    """Returns the bytes of RAM that are available."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 9 // 10


def with_deepspeed(model: Any) -> Any:
    """Wraps the model with DeepSpeed: parameters stay in pinned RAM and pass through the GPU layer
    by layer."""
    import deepspeed

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    parameters = {"device": "cpu", "pin_memory": True}
    config = {
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": parameters},
        "train_micro_batch_size_per_gpu": 1,
    }
    return deepspeed.initialize(model=model, config=config)[0].module.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="facebook/opt-1.3b")
    choices = ["none", "cpu", "disk", "auto", "zero"]
    parser.add_argument("--offload", choices=choices, default="disk")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    dtypes = ["bfloat16", "float32", "float16"]
    parser.add_argument(
        "--dtype", choices=dtypes, help="To compute in; default: float16 on a GPU, else bfloat16."
    )
    parser.add_argument("--device-memory", type=int, help="Bytes of the GPU that may be used.")
    parser.add_argument("--host-memory", type=int, help="Bytes of weights in RAM for auto.")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=32)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--write-only", action="store_true", help="Only write the checkpoint.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.dtype = args.dtype or ("float16" if args.device == "cuda" else "bfloat16")
    path = write_checkpoint(args.model, args.folder)
    if args.write_only:
        return
    if args.device == "cuda" and args.device_memory:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.device_memory / whole)
    model = load(path, args)
    torch.manual_seed(0)
    ids = torch.randint(4, model.config.vocab_size, (args.batch_size, args.prompt_len))
    ids = ids.to(args.device)

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
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    if args.offload == "none" or args.device == "cuda":
        generate(2)
    total = generate(args.gen_len)
    report = {
        "model": args.model,
        "offload": args.offload,
        "dtype": args.dtype,
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
