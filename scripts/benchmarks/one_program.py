"""Compares generation by the shipped model with one program of the whole model, written by hand.

    python scripts/benchmarks/one_program.py

One sequence, fp32, greedy. The program takes a token and all keys and values, and returns the next
token; this is the program for a single small OPT that stays in memory. It runs as XLA
compiles it by default, and without the library for products that XLA takes by default (YNNPACK).
PyTorch's transformers run too where they are installed. All runs take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from flexgen_jax import LLM, SamplingParams
from flexgen_jax.models.loading import shipped_model

HEADS, LAYERS, OFFSET = 4, 5, 2  # of the shipped model; OPT's positions begin at 2
Weights = dict[str, jax.Array]
DEFAULT, OWN_LOOPS = {}, {"xla_cpu_experimental_ynn_fusion_type": ""}


def norm(x: jax.Array, w: Weights, name: str) -> jax.Array:
    centred = x - x.mean()
    scaled = centred * jax.lax.rsqrt((centred**2).mean() + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def dense(x: jax.Array, w: Weights, name: str) -> jax.Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


Cache = list[tuple[jax.Array, jax.Array]]


def step(w: Weights, cache: Cache, token: jax.Array, at: jax.Array) -> tuple[jax.Array, Cache]:
    """Returns the next token and the cache, of each layer keys and values, fp32 [head, token,
    head_dim], for one token at position `at`."""
    decoder, length = "model.decoder", cache[0][0].shape[1]
    table = w[f"{decoder}.embed_tokens.weight"]
    x = (table[token] + w[f"{decoder}.embed_positions.weight"][at + OFFSET])[None]
    size = x.size // HEADS
    is_known = jnp.arange(length) <= at
    kept = []
    for layer, sides in enumerate(cache):
        name = f"{decoder}.layers.{layer}"
        y = norm(x, w, f"{name}.self_attn_layer_norm")
        query, *new = (
            dense(y, w, f"{name}.self_attn.{side}_proj").reshape(HEADS, 1, size) for side in "qkv"
        )
        key, value = (
            jax.lax.dynamic_update_slice(side, own, (0, at, 0))
            for side, own in zip(sides, new, strict=True)
        )
        kept.append((key, value))
        scores = jnp.einsum("hqd,htd->ht", query, key) / size**0.5
        shares = jax.nn.softmax(jnp.where(is_known, scores, -jnp.inf))
        seen = jnp.einsum("ht,htd->hd", shares, value).reshape(1, -1)
        x = x + dense(seen, w, f"{name}.self_attn.out_proj")
        y = dense(norm(x, w, f"{name}.final_layer_norm"), w, f"{name}.fc1")
        x = x + dense(jax.nn.relu(y), w, f"{name}.fc2")
    logits = norm(x, w, f"{decoder}.final_layer_norm") @ table.T
    return logits.argmax(), kept


def by_hand(prompt: list[int], new: int, options: dict[str, str]) -> Callable[[], list[int]]:
    """Returns a function that generates `new` tokens; the prompt's tokens go one by one, too."""
    stored = load_file(shipped_model() / "model.safetensors")
    weights = {name: jnp.asarray(value, jnp.float32) for name, value in stored.items()}
    size = weights["model.decoder.embed_tokens.weight"].shape[1] // HEADS
    nothing = partial(jnp.zeros, (HEADS, len(prompt) + new, size), jnp.float32)

    def empty() -> Cache:
        return [(nothing(), nothing()) for _ in range(LAYERS)]

    first = (jnp.int32(0), jnp.int32(0))
    program = jax.jit(step, donate_argnums=1).lower(weights, empty(), *first)
    run = program.compile(compiler_options=options)

    def generate() -> list[int]:
        cache, found = empty(), []
        places = [jnp.int32(at) for at in range(len(prompt) + new)]
        for at, token in enumerate(prompt):
            following, cache = run(weights, cache, jnp.int32(token), places[at])
        for at in range(len(prompt), len(prompt) + new):
            found.append(int(following))
            following, cache = run(weights, cache, following.astype(jnp.int32), places[at])
        return found

    return generate


def ours(llm: LLM, prompt: list[int], new: int) -> Callable[[], list[int]]:
    wanted = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    ids = [prompt]
    return lambda: list(llm.generate(prompt_token_ids=ids, sampling_params=wanted)[0].token_ids)


def by_torch(prompt: list[int], new: int) -> Callable[[], list[int]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(shipped_model()), dtype=torch.float32)
    ids = torch.tensor([prompt])
    lengths = {"min_new_tokens": new, "max_new_tokens": new}
    return lambda: model.generate(ids, **lengths, do_sample=False)[0, len(prompt) :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    prompt = [2, *np.random.default_rng(0).integers(4, 4096, 7).tolist()]
    with LLM(dtype="float32") as llm:
        runs = {
            "flexgen-jax": ours(llm, prompt, args.new),
            "one program, XLA's defaults": by_hand(prompt, args.new, DEFAULT),
            "one program, XLA's own loops": by_hand(prompt, args.new, OWN_LOOPS),
        }
        if find_spec("transformers") and find_spec("torch"):
            runs["transformers"] = by_torch(prompt, args.new)
        texts = {name: run() for name, run in runs.items()}  # compiles, and warms up
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.repeat):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                speeds[name].append(args.new / (time.perf_counter() - started))
    print("| what | token/s | lowest | highest | tokens as ours |\n| --- | --- | --- | --- | --- |")
    for name, found in speeds.items():
        equal = sum(a == b for a, b in zip(texts[name], texts["flexgen-jax"], strict=True))
        cells = [f"{x:.0f}" for x in (statistics.median(found), min(found), max(found))]
        print("| " + " | ".join([name, *cells, f"{equal} of {args.new}"]) + " |")


if __name__ == "__main__":
    main()
