"""Compares a server with many clients to one job, and texts of mixed lengths to equal texts.

    python scripts/benchmarks/clients.py --model MODEL
    python scripts/benchmarks/clients.py --model MODEL --lengths

Each run is a process with a cache folder of its own, so that the first pass compiles its programs.
The clients are another process with 64 connections. Prints a line of JSON for each pass: token/s of
the new tokens, and for clients the median and the largest seconds to an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

CONNECTIONS, REQUESTS = 64, 512


def texts_of(options: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Returns prompts as token ids, and how many new tokens each asks for."""
    draw = random.Random(5)  # noqa: S311 - no secret

    def row(tokens: int) -> list[int]:
        return [draw.randrange(100, 400) for _ in range(tokens)]

    if options.kind == "clients":
        return [(row(draw.randint(4, 60)), draw.randint(1, 64)) for _ in range(options.requests)]
    mixed = [
        (min(400, max(16, round(draw.lognormvariate(4.5, 0.8)))), clipped(draw, 32, 256))
        for _ in range(options.requests)
    ]
    if options.kind == "equal":  # as many tokens
        prompt, new = (round(sum(x) / len(mixed)) for x in zip(*mixed, strict=True))
        mixed = [(prompt, new)] * options.requests
    return [(row(prompt), new) for prompt, new in mixed]


def clipped(draw: random.Random, typical: int, most: int) -> int:
    """Returns a log-normal number of new tokens."""
    return min(most, max(1, round(typical * draw.lognormvariate(0, 0.8))))


def as_job(llm: Any, texts: list[tuple[list[int], int]]) -> float:
    """Runs texts as a stream; returns the seconds."""
    from flexgen_jax import Request, SamplingParams

    requests = [
        Request(str(n), prompt_token_ids=row, sampling_params=SamplingParams.plain(new))
        for n, (row, new) in enumerate(texts)
    ]
    started = time.perf_counter()
    results = list(llm.stream(iter(requests)))
    assert sorted(len(result.token_ids) for result in results) == sorted(new for _, new in texts)
    return time.perf_counter() - started


def jobs(options: argparse.Namespace) -> None:
    """Runs the texts as jobs; prints the figures of each pass."""
    from flexgen_jax import LLM

    texts = texts_of(options)
    with LLM(options.model, **json.loads(options.options)) as llm:
        for number in range(options.passes):
            show(options.kind + " as a job", number, texts, as_job(llm, texts))


def show(name: str, number: int, texts: Any, seconds: float, **more: Any) -> None:
    tokens = sum(new for _, new in texts)
    row = {"run": name, "pass": number + 1, "seconds": round(seconds, 2)}
    print(json.dumps({**row, "token/s": round(tokens / seconds, 1), **more}), flush=True)


def server(options: argparse.Namespace) -> None:
    """Serves the model to a process of clients; prints the figures of each pass."""
    from flexgen_jax import LLM
    from tests.helpers.serving import served

    with (
        LLM(options.model, **json.loads(options.options)) as llm,
        served(llm, lengths=(64, 64)) as (address, _),
    ):
        command = [sys.executable, __file__, "--model", address]
        command += ["--kind", "clients", "--passes", str(options.passes), "--part", "ask"]
        subprocess.run([*command, "--requests", str(options.requests)], check=True)


def ask(options: argparse.Namespace) -> None:
    """Asks a server as 64 clients; each client asks for one text at a time."""
    texts = texts_of(options)
    for number in range(options.passes):
        seconds, waits = asyncio.run(asked(options.model, texts))
        waited = {"median_s": round(median(waits), 3), "largest_s": round(max(waits), 3)}
        show("clients", number, texts, seconds, **waited)


async def asked(address: str, texts: list[tuple[list[int], int]]) -> tuple[float, list[float]]:
    """Returns the seconds of all texts, and those of each."""
    import httpx

    waiting, waits = list(reversed(texts)), []
    limits = httpx.Limits(max_connections=CONNECTIONS)

    async def client(http: httpx.AsyncClient) -> None:
        while waiting:
            row, new = waiting.pop()
            body = {"prompt": row, "max_tokens": new, "ignore_eos": True, "temperature": 0}
            started = time.perf_counter()
            answer = await http.post(f"{address}/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == new, answer.text
            waits.append(time.perf_counter() - started)

    started = time.perf_counter()
    async with httpx.AsyncClient(timeout=600, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(CONNECTIONS)))
    return time.perf_counter() - started, waits


PARTS = {"jobs": jobs, "server": server, "ask": ask}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--options", default="{}", help="those of LLM, as JSON")
    parser.add_argument("--lengths", action="store_true", help="compare mixed to equal lengths")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="clients", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        PARTS[options.part](options)
        return
    runs = [("jobs", "clients"), ("server", "clients")]
    if options.lengths:
        runs = [("jobs", "equal"), ("jobs", "mixed")]
    for part, kind in runs:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part, "--kind", kind]
            subprocess.run(command, check=True, env={**os.environ, "XDG_CACHE_HOME": cache})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
