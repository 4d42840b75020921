"""Checks the server under load: clients at once, some disconnecting, and invalid requests.

    python scripts/checks/check_server.py [REQUESTS]

64 clients ask a tiny random model for texts of random lengths, whole or in pieces; one in ten goes
away before the end. Every answer must be the library's, in fp32. Between them come bodies that are
no requests, which must get a status from 400 to 499. At the end nothing may be under way, and no
thread may be left. The most memory so far is printed after a tenth of the requests, and after all.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from flexgen_jax import LLM, Policy, SamplingParams
from tests.helpers.models import write_checkpoint
from tests.helpers.serving import serving

CLIENTS = 64
POLICY = Policy(batch_size=16, num_batches=2)
NONSENSE = [b"", b"{", b"[]", b'{"prompt": 3}', b'{"prompt": "x", "max_tokens": "y"}', b"\xff\xfe"]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    rng = random.Random(0)  # noqa: S311 - no secret
    prompts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 40))) for _ in range(count)]
    lengths = [rng.randint(1, 24) for _ in prompts]
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "tiny")
        params = [SamplingParams(max_tokens=n, temperature=0) for n in lengths]
        with LLM(model, dtype="float32", policy=POLICY) as llm:
            right = [result.text for result in llm.generate(prompts, params)]
        threads = threading.active_count()
        outcomes = _under_load(model, prompts, lengths, right)
    left = threading.active_count() - threads
    print(f"{dict(outcomes)}; {left} threads left")
    sys.exit(bool(outcomes["wrong"] or outcomes["bad status"] or left > 0))


def _under_load(
    model: Path, prompts: list[str], lengths: list[int], right: list[str]
) -> Counter[str]:
    """Asks a server; returns how many answers were right, wrong, or not waited for."""
    with serving(model, POLICY, most=4 * CLIENTS) as (root, server):
        address = f"{root}/v1/completions"
        began, outcomes = time.monotonic(), Counter[str]()
        with httpx.Client(limits=httpx.Limits(max_connections=CLIENTS), timeout=300) as client:

            def ask(number: int) -> str:
                return _asked(client, address, prompts[number], lengths[number], right[number])

            tenth = len(prompts) // 10
            for first, last in ((0, tenth), (tenth, len(prompts))):
                with ThreadPoolExecutor(CLIENTS) as pool:
                    outcomes += Counter(pool.map(ask, range(first, last)))
                used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(f"{last} requests, {time.monotonic() - began:.1f} s, {used:.0f} MiB at most")
        deadline = time.monotonic() + 60
        while server.engine.running or server.engine.waiting:
            assert time.monotonic() < deadline, "texts of clients that are gone are under way"
            time.sleep(0.05)
    return outcomes


def _asked(client: httpx.Client, address: str, prompt: str, length: int, right: str) -> str:
    """Asks for a text; returns the outcome."""
    rng = random.Random(prompt)  # noqa: S311 - no secret
    if rng.random() < 0.2:
        answer = client.post(address, content=rng.choice(NONSENSE))
        if not 400 <= answer.status_code < 500 or "error" not in answer.json():
            return "bad status"
    leaves, streams = rng.random() < 0.1, rng.random() < 0.5
    body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "stream": streams}
    try:
        if not streams:
            limit = rng.random() * 0.2 if leaves else 300
            answer = client.post(address, json=body, timeout=limit)
            text = answer.json()["choices"][0]["text"]
        else:
            with client.stream("POST", address, json=body) as pieces:
                text = ""
                for line in pieces.iter_lines():
                    if leaves:
                        return "left"
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
    except httpx.TimeoutException:
        return "left"
    return "right" if text == right else "wrong"


if __name__ == "__main__":
    main()
