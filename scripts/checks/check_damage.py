"""Damages stored files, a bit or the end of a random file at a time, and runs again.

Each command must end without a traceback. It must give the tokens of an undamaged run, or refuse
the damaged file by name. Weights, KV pieces and compiled programs are damaged together
before a run, and results and journal before a job is resumed.

    python scripts/checks/check_damage.py [--damages 500] [--each 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TEXT = "The people of the United States, in order to form a more perfect union, establish " * 4
GREEDY = ("--dtype", "float32", "--temperature", "0")
ON_DISK = ("--percent", "0", "0", "0", "0", "0", "0")
LIMIT_S = 120.0


class Trial(NamedTuple):
    """A command that uses stored files. kinds: file patterns; one file of each is damaged."""

    name: str
    kinds: tuple[str, ...]
    run: Callable[[Path], tuple[int, str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--each", type=int, default=3, help="damages of each kind before a run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        base.mkdir()
        prepare(base)
        trials = [
            Trial("generate", ("off/weights/**/*", "kv/**/*.kv", "cache/**/*-cache"), generate),
            Trial("batch", ("out.jsonl", "out.jsonl.journal"), resume),
            Trial("manifest", ("out.jsonl.manifest",), resume),
            Trial("plan", ("cache/flexgen_jax/profiles/*.json",), plan),
        ]
        expected = {}
        for trial in trials:
            home = Path(name) / f"expected-{trial.name}"
            shutil.copytree(base, home)
            expected[trial.name] = trial.run(home)
            shutil.rmtree(home)
        each = options.each * sum(len(trial.kinds) for trial in trials)
        work = [(trial, n) for n in range(-(-options.damages // each)) for trial in trials]

        def check(job: tuple[Trial, int]) -> str:
            trial, number = job
            rng = random.Random(f"{options.seed}-{trial.name}-{number}")  # noqa: S311 - places
            home = Path(name) / f"{trial.name}-{number}"
            shutil.copytree(base, home)
            kinds = [kind for kind in trial.kinds for _ in range(options.each)]
            damages = [damage(rng, home, kind) for kind in kinds]
            fault = fault_of(trial.run(home), expected[trial.name])
            shutil.rmtree(home)
            return f"{trial.name}, {'; '.join(damages)}: {fault}" if fault else ""

        damages = faults = 0
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for (trial, _), fault in zip(work, pool.map(check, work), strict=True):
                damages, faults = damages + options.each * len(trial.kinds), faults + bool(fault)
                print(fault or f"{damages} damages", flush=True)
    print(f"{damages} damages, {faults} runs with faults")
    sys.exit(bool(faults))


def fault_of(found: tuple[int, str, str], expected: tuple[int, str, str]) -> str:
    """Returns a run's fault, "" without one."""
    status, output, messages = found
    if status < 0 or "Traceback" in messages:
        return f"status {status}, {messages[-500:]}"
    if status == 0 and output != expected[1]:
        return "another output"
    if status not in (0, 2):
        return f"status {status}, {messages[-200:]}"
    return ""


def damage(rng: random.Random, home: Path, kind: str) -> str:
    """Damages a random file of a kind; returns a description of the damage."""
    files = sorted(path for path in home.glob(kind) if path.is_file() and path.stat().st_size > 1)
    if not files:
        return f"nothing is left of {kind}"
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    place = rng.randrange(1, len(content))
    if rng.random() < 0.2:
        path.write_bytes(content[:place])
        return f"{path.relative_to(home)} cut at {place}"
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"a bit of byte {place} of {path.relative_to(home)}"


def command(home: Path, *arguments: str) -> subprocess.Popen[str]:
    executable = Path(sys.executable).with_name("flexgen-jax")
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    return subprocess.Popen(
        [str(executable), "-q", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
        env=environment,
        cwd=home,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, messages = process.communicate(timeout=LIMIT_S)
    return process.returncode, output, messages


def generate(home: Path) -> tuple[int, str, str]:
    return ended(command(home, "generate", *GENERATE, "--max-tokens", "12", TEXT))


GENERATE: Sequence[str] = (
    *(*GREEDY, *ON_DISK, "--offload-dir", "off"),
    *("--kv-store", "1GB", "--kv-store-dir", "kv"),
)
BATCH: Sequence[str] = ("-i", "in.jsonl", "-o", "out.jsonl", "--dtype", "float32")


def resume(home: Path) -> tuple[int, str, str]:
    """Resumes the job; its output is its texts, by line."""
    status, _, messages = ended(command(home, "batch", *BATCH, "--batch-size", "4"))
    texts = {}
    if status == 0:
        for line in (home / "out.jsonl").read_text().splitlines():
            record = json.loads(line)
            texts[record["line"]] = record["text"]
    return status, json.dumps(sorted(texts.items())), messages


def plan(home: Path) -> tuple[int, str, str]:
    """Plans for this machine; a damaged profile is made again, with other rates."""
    status, _, messages = ended(command(home, "plan", "--offload-dir", "off"))
    return status, "", messages


def prepare(home: Path) -> None:
    """Fills a home: a run on disk with a KV store, a profile, and a job that is interrupted."""
    lines = (
        json.dumps({"id": str(n), "prompt": f"{n} people", "max_tokens": 60, "temperature": 0})
        for n in range(60)
    )
    (home / "in.jsonl").write_text("\n".join(lines) + "\n")
    for status, _, messages in (generate(home), plan(home)):
        assert status == 0, messages
    job = command(home, "batch", *BATCH, "--batch-size", "4", "--journal-interval", "0.1")
    deadline = time.monotonic() + LIMIT_S
    results, journal = home / "out.jsonl", home / "out.jsonl.journal"
    while time.monotonic() < deadline:
        if results.exists() and results.stat().st_size > 2000 and journal.exists():
            break
        time.sleep(0.02)
    job.send_signal(signal.SIGINT)
    assert ended(job)[0] == 130
    assert journal.exists() and results.stat().st_size


if __name__ == "__main__":
    main()
