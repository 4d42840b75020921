"""Measures what sharing prefixes saves: documents with questions each, texts of one prompt, and
the rounds of a conversation.

    python scripts/benchmarks/shared_prefixes.py --memory 2GB --documents 16 --questions 8
    python scripts/benchmarks/shared_prefixes.py --rounds 8 --kv-store 20GB --kv-store-dir /ssd/kv

Each run is a process of its own, with random weights of a known shape, in a memory cgroup if it may
make one (as root). Prints a line of JSON for each, with the seconds that the profile of the machine
predicted, and compares the tokens of all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from disk_rate import read_rate
from flexgen_jax import LLM, SamplingParams
from flexgen_jax.units import parse_bytes
from limits import drop_page_cache, run_limited


def asked(options: argparse.Namespace) -> list[list[int]]:
    """Returns questions about documents, shuffled."""
    draw = random.Random(1)  # noqa: S311

    def some(count: int) -> list[int]:
        return [draw.randrange(10, 30_000) for _ in range(count)]

    documents = [some(options.document_tokens) for _ in range(options.documents)]
    rows = [
        [*d, *some(options.question_tokens)] for d in documents for _ in range(options.questions)
    ]
    draw.shuffle(rows)
    return rows


def measure(options: argparse.Namespace, shares: bool) -> dict[str, Any]:
    """Returns the seconds and the report of one run, with its tokens."""
    params = SamplingParams(
        max_tokens=options.new_tokens,
        ignore_eos=True,
        n=options.texts,
        temperature=1.0 if options.texts > 1 else 0.0,
    )
    rows = asked(options)
    with LLM(
        options.model,
        dummy_weights=True,
        dtype=options.dtype,
        prefix_sharing=shares,
        offload_dir=options.offload_dir,
        kv_store=options.kv_store,
        kv_store_dir=options.kv_store_dir,
        host_memory=options.host_memory,
    ) as llm:
        started = time.monotonic()
        results = llm.generate(prompt_token_ids=rows, sampling_params=params)
        seconds, report = time.monotonic() - started, llm.report()
        policy = str(llm.policy)
    names = ("prompt_tokens", "shared_prompt_tokens", "stored_prompt_tokens", "prefill_s")
    names += ("decode_s", "init_s", "compile_in_run_s", "predicted")
    tokens = [x.token_ids for r in results for x in (r, *r.others)]
    figures = {"seconds": seconds, **{name: report[name] for name in names}}
    return {**figures, "policy": policy, "asked": sum(map(len, rows)), "tokens": tokens}


def measure_round(options: argparse.Namespace, said: list[int]) -> dict[str, Any]:
    """Returns the figures of one round of a conversation, and the conversation after it."""
    params = SamplingParams(max_tokens=options.new_tokens, ignore_eos=True)
    with LLM(
        options.model,
        dummy_weights=True,
        dtype=options.dtype,
        offload_dir=options.offload_dir,
        kv_store=options.kv_store,
        kv_store_dir=options.kv_store_dir,
        host_memory=options.host_memory,
    ) as llm:
        store = llm._runner._kv_store
        stored = store.open(said[: store.stored_tokens(said[:-1])])
        load_s, nbytes = 0.0, 0
        if stored is not None:
            drop_page_cache()
            started = time.monotonic()
            nbytes = sum(array.nbytes for layer in stored.read() for array in layer)
            load_s = time.monotonic() - started
            stored.close()
            drop_page_cache()
        (result,) = llm.generate(prompt_token_ids=[said], sampling_params=params)
        report = llm.report()
    names = ("prompt_tokens", "stored_prompt_tokens", "prefill_s", "decode_s", "compile_in_run_s")
    figures = {name: report[name] for name in names}
    rate = nbytes / load_s if load_s else 0.0
    return {**figures, "asked": len(said), "read_rate": rate, "made": result.token_ids}


def converse(options: argparse.Namespace) -> None:
    """Measures a conversation with one process per round."""
    draw, said = random.Random(2), list[int]()  # noqa: S311
    for number in range(options.rounds):
        count = options.document_tokens if not number else options.question_tokens
        said += [draw.randrange(10, 30_000) for _ in range(count)]
        command = [sys.executable, *sys.argv, "--child", json.dumps(said)]
        outcome = run_limited(command, options.memory, timeout=3600)
        if outcome.returncode != 0:
            sys.exit(outcome.output)
        figures = json.loads(outcome.output.splitlines()[-1])
        said += figures.pop("made")
        folder = Path(options.kv_store_dir).expanduser()
        print(json.dumps({"round": number, **figures, "disk_rate": read_rate(folder)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="facebook/opt-1.3b")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--document-tokens", type=int, default=1000)
    parser.add_argument("--question-tokens", type=int, default=30)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--texts", type=int, default=1, help="texts of each prompt")
    parser.add_argument("--rounds", type=int, help="of a conversation, instead of documents")
    parser.add_argument("--memory", type=parse_bytes, help="bytes of the cgroup")
    parser.add_argument("--host-memory")
    parser.add_argument("--offload-dir")
    parser.add_argument("--kv-store")
    parser.add_argument("--kv-store-dir")
    parser.add_argument("--only", choices=["sharing", "alone"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child and options.rounds:
        print(json.dumps(measure_round(options, json.loads(options.child))))
        return
    if options.rounds:
        converse(options)
        return
    if options.child:
        print(json.dumps(measure(options, options.child == "sharing")))
        return
    made = []
    for way in [options.only] if options.only else ["sharing", "alone"]:
        command = [sys.executable, *sys.argv, "--child", way]
        outcome = run_limited(command, options.memory, timeout=7200)
        if outcome.returncode != 0:
            sys.exit(outcome.output)
        made.append({**json.loads(outcome.output.splitlines()[-1]), "peak": outcome.peak_bytes})
        shown = {name: value for name, value in made[-1].items() if name != "tokens"}
        print(json.dumps({"run": way, **shown}), flush=True)
    if len(made) == 2:
        equal = sum(a == b for a, b in zip(made[0]["tokens"], made[1]["tokens"], strict=True))
        share = made[0]["seconds"] / made[1]["seconds"]
        print(f"{equal} of {len(made[0]['tokens'])} texts are equal; {share:.2f} of the time")


if __name__ == "__main__":
    main()
