"""Measures a model's perplexity in several widths, with products of integers, and with sparse
attention, on its held-out text or on another text.

    python scripts/perplexity.py --json docs/benchmarks/log/accuracy.json

The text is cut into consecutive windows of the whole context, each with the beginning-of-text token
first, as when the shipped model was trained. Where the KV cache is quantized or attention is
sparse, windows are read token by token through the cache, as in a generation. For comparison, one
row without either is read that way too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flexgen_jax import LLM, Placement, Policy
from flexgen_jax.models.loading import open_model, shipped_model

BITS = [(16, 16), (8, 16), (4, 16), (16, 8), (16, 4), (8, 8), (4, 4)]
RUNS = [(*bits, 16, 1.0) for bits in BITS]
RUNS += [(16, 16, 8, 1.0), (4, 16, 8, 1.0), (4, 4, 8, 1.0)]
RUNS += [(bits, bits, 16, f) for bits in (16, 4) for f in (0.5, 0.2, 0.1)]
"""The bits of weights, of the KV cache and of products, and the fraction of tokens attended to."""


def windows(model: str, text: str) -> list[list[int]]:
    """Returns the text's tokens in windows of the context's length, each after the token that
    begins a text; a short rest is left out."""
    opened = open_model(model, dummy_weights=False, seed=0)
    assert opened.tokenizer is not None, "the model has a tokenizer"
    (first, *ids), step = opened.tokenizer.encode(text), opened.config.max_positions - 1
    return [[first, *ids[i : i + step]] for i in range(0, len(ids) - step + 1, step)]


def perplexity(
    model: str, ids: Sequence[Sequence[int]], policy: Policy, through_cache: bool
) -> float:
    """Returns exp of the mean negative log-probability per token, in fp32."""
    with LLM(model, policy=policy, dtype="float32") as llm:
        scores = llm.score(prompt_token_ids=ids, through_cache=through_cache)
    logprobs = [x for score in scores for x in score.logprobs]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def rows(model: str, ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for weight_bits, cache_bits, matmul_bits, sparsity in (RUNS[0], *RUNS):
        policy = Policy(
            cache=Placement(0, 1),
            batch_size=64,
            weight_bits=weight_bits,
            cache_bits=cache_bits,
            matmul_bits=matmul_bits,
            attention_sparsity=sparsity,
        )
        through_cache = cache_bits < 16 or policy.is_sparse or len(found) == 1
        started = time.perf_counter()
        value = perplexity(model, ids, policy, through_cache)
        found.append(
            {
                "weight_bits": weight_bits,
                "cache_bits": cache_bits,
                "matmul_bits": matmul_bits,
                "attention_sparsity": sparsity,
                "through_cache": through_cache,
                "perplexity": value,
                "change": value / found[0]["perplexity"] - 1 if found else 0.0,
                "seconds": time.perf_counter() - started,
            }
        )
        print(found[-1], flush=True)
    return found


def markdown(found: list[dict[str, Any]]) -> str:
    lines = ["| weights | KV cache | products | tokens attended to | perplexity | change |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    names = {16: "fp32", 8: "8 bits", 4: "4 bits"}
    for row in found:
        cache = names[row["cache_bits"]]
        if row["cache_bits"] == 16:
            cache = "fp32, token by token" if row["through_cache"] else "none (whole windows)"
        attended = f"{100 * row['attention_sparsity']:.0f} %"
        bits = (names[row["weight_bits"]], cache, names[row["matmul_bits"]])
        cells = [*bits, attended, f"{row['perplexity']:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{100 * row['change']:+.2f} %"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(shipped_model()), help="Default: the shipped one.")
    parser.add_argument("--text", type=Path, help="Default: the shipped model's heldout.txt.")
    parser.add_argument("--windows", type=int, help="Use the first N windows only.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.text or shipped_model() / "heldout.txt"
    ids = windows(args.model, path.read_text(encoding="utf-8"))[: args.windows]
    found = rows(args.model, ids)
    print(markdown(found))
    if args.json:
        content = {"text": path.name, "windows": len(ids), "window": len(ids[0]), "runs": found}
        args.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
