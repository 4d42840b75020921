"""Checks that completions do not depend on concurrent requests.

Requests with prompts and texts of random lengths come at random times through `LLM.stream`, under
many placements and schedules, with and without overlap; every token must equal that of a run with a
single request. Where one differs, it counts as a tie if a run in which the two tokens are scored
gives them log-probabilities within 1e-4 of each other.

    python scripts/checks/check_waves.py               20 requests: every combination of placement,
                                                schedule, overlap and chunk of prompts
    python scripts/checks/check_waves.py --requests 500 --pairwise
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.policy import plan
from flexgen_jax.policy.schedules import SCHEDULES
from flexgen_jax.policy.segments import Segment, segments_of

PLACEMENTS = [
    (100, 0, 100, 0, 100, 0),
    (0, 100, 0, 100, 0, 100),
    (0, 0, 0, 0, 0, 0),
    (30, 40, 20, 50, 0, 100),
    (20, 80, 0, 100, 100, 0),
    (0, 50, 40, 0, 0, 0),
    (100, 0, 0, 0, 100, 0),
    (50, 0, 50, 50, 50, 50),
]
MAIN = (PLACEMENTS, list(SCHEDULES), [True, False], [2048, 64, 16])
OTHERS = ([1, 3], [True, False], ["device", "host"], [True, False])
AXES = (*MAIN, *OTHERS)
"""Percentages, schedule, overlap and chunk of prompts; batches, one RAM or two, attention, whether
padding is left out however little it is."""

TIE = 1e-4

Tokens = dict[str, list[int]]


def requests(count: int, seed: int, longest: int) -> list[Request]:
    """Returns random requests; a third of them is sampled."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    return [
        Request(
            str(number),
            prompt_token_ids=[rng.randrange(4, 4000) for _ in range(rng.randint(4, longest))],
            sampling_params=SamplingParams(
                rng.randint(1, longest * 3 // 4),
                temperature=rng.choice([0.0, 0.0, 0.9]),
                seed=rng.randrange(1000),
                ignore_eos=True,
            ),
        )
        for number in range(count)
    ]


def arriving(asked: Sequence[Request], seed: int) -> Iterator[Request]:
    """Yields requests now and then."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    for request in asked:
        time.sleep(rng.choice([0, 0, 0, 0.001, 0.02]))
        yield request


def run(asked: Sequence[Request], policy: Policy, unified: bool, seed: int) -> Tokens:
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(dtype="float32", policy=policy, unified=unified, offload_dir=Path(folder)) as llm,
    ):
        return {r.id: r.token_ids for r in llm.stream(arriving(asked, seed))}


def alone(asked: Sequence[Request], seed: int) -> Tokens:
    """Runs each request alone. All are continued as far as the longest, and then cut, so that
    few shapes are compiled: a text depends on no limit but by its length."""
    limits = {r.id: r.sampling_params.max_tokens for r in asked}
    longest = max(limits.values())
    as_long = [
        replace(r, sampling_params=replace(r.sampling_params, max_tokens=longest)) for r in asked
    ]
    found = run(as_long, Policy(batch_size=1, kv_block_tokens=512), True, seed)
    return {name: tokens[: limits[name]] for name, tokens in found.items()}


def kept(file: Path | None, asked: Sequence[Request], seed: int) -> Tokens:
    """Returns the texts of requests alone, from a file if it has them."""
    if file is None:
        return alone(asked, seed)
    about = [[r.id, list(r.prompt_token_ids or ()), r.sampling_params.max_tokens] for r in asked]
    if file.exists():
        known = json.loads(file.read_text())
        if known["requests"] != about:
            sys.exit(f"{file}: has the texts of other requests; remove it")
        return dict(known["texts"])
    found = alone(asked, seed)
    file.write_text(json.dumps({"requests": about, "texts": found}))
    return found


def always_worth_it(padding: Sequence[int], worth: int, together: int) -> tuple[Segment, ...]:
    """Leaves out padding even where that takes less time than the compilation that it costs."""
    return segments_of(padding, 0, min(together, 4))


def is_tie(llm: LLM, request: Request, right: list[int], found: list[int]) -> bool:
    """Returns whether the first tokens that differ are equally likely."""
    at = next(i for i, (a, b) in enumerate(zip(right, found, strict=False)) if a != b)
    before = [*(request.prompt_token_ids or ()), *right[:at]]
    rows = [[*before, right[at]], [*before, found[at]]]
    first, second = (score.logprobs[-1] for score in llm.score(prompt_token_ids=rows))
    return abs(first - second) <= TIE


def combinations(pairwise: bool) -> list[tuple[Any, ...]]:
    rng, found = random.Random(0), list[tuple[Any, ...]]()  # noqa: S311 - no secret
    if not pairwise:
        return [(*chosen, *map(rng.choice, OTHERS)) for chosen in product(*MAIN)]
    axes = range(len(AXES))
    left = {
        (i, a, j, b)
        for i, j in product(axes, repeat=2)
        if i < j
        for a, b in product(range(len(AXES[i])), range(len(AXES[j])))
    }
    while left:
        tried = [tuple(rng.randrange(len(axis)) for axis in AXES) for _ in range(200)]
        pairs = [{(i, c[i], j, c[j]) for i, j in product(axes, repeat=2) if i < j} for c in tried]
        best = max(range(200), key=lambda n: len(pairs[n] & left))
        left -= pairs[best]
        found.append(tuple(axis[index] for axis, index in zip(AXES, tried[best], strict=True)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--longest", type=int, default=100, help="tokens of a prompt, at most")
    parser.add_argument("--pairwise", action="store_true", help="few combinations, with all pairs")
    parser.add_argument("--most", type=int, help="how many combinations, the first ones")
    parser.add_argument("--skip", type=int, default=0, help="how many of these are left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expected", type=Path, help="file that keeps the texts of requests alone")
    args = parser.parse_args()
    asked = requests(args.requests, args.seed, args.longest)
    expected = kept(args.expected, asked, args.seed)
    wrong = ties = 0
    chosen = combinations(args.pairwise)[: args.most]
    tried = list(enumerate(chosen))[args.skip :]
    with LLM(dtype="float32", policy=Policy(batch_size=2)) as judge:
        for number, chosen_ones in tried:
            percent, schedule, overlap, chunk, batches, unified, attention, leaves_out = chosen_ones
            policy = Policy.from_percent(
                *percent,
                batch_size=48 if args.requests > 100 else 8,
                num_batches=batches,
                schedule=schedule,
                overlap=overlap,
                attention=attention,
                kv_block_tokens=64 if args.requests > 100 else 8,
                prefill_chunk=chunk,
            )
            divide = always_worth_it if leaves_out else segments_of
            with mock.patch.object(plan, "segments_of", divide):
                found = run(asked, policy, unified, number)
            bad = [r for r in asked if found[r.id] != expected[r.id]]
            tied = sum(is_tie(judge, r, expected[r.id], found[r.id]) for r in bad)
            ties, wrong = ties + tied, wrong + len(bad) - tied
            print(
                f"{number + 1}/{len(chosen)} {percent} {schedule} overlap={overlap} x{batches} "
                f"unified={unified} {attention} chunks of {chunk} segments={leaves_out}: "
                f"{len(bad) - tied} wrong, {tied} ties",
                flush=True,
            )
    print(f"{len(tried)} combinations of {len(asked)} requests: {wrong} wrong texts, {ties} ties")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
