"""Kills and stops each stage of a job in turn, in prefill and while decoding.

    python scripts/checks/check_lost_stages.py

After SIGKILL every process must be gone within ten seconds, after SIGSTOP within thirty, with exit
code 1 and the stage's name. Then the job is resumed, and must give the results of an undisturbed
job.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from two_stages import stage_processes

ALLOWED_S = {signal.SIGKILL: 10.0, signal.SIGSTOP: 30.0}
MAKES_TOKENS = re.compile(r"[1-9][0-9]*\.[0-9] token/s|0\.[1-9] token/s")
PHASES = {"prefill": re.compile("generating"), "decoding": MAKES_TOKENS}


def write_requests(file: Path, count: int) -> None:
    """Writes prompts of token ids, whose prefill takes some seconds."""
    lines = (
        {"id": str(n), "prompt_token_ids": [2, *range(n, n + 128)], "max_tokens": 24}
        for n in range(count)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def command(folder: Path, out: str, stages: int) -> list[str]:
    model = ["--model", "facebook/opt-125m", "--dummy-weights", "--dtype", "float32"]
    how = ["--percent", "100", "0", "100", "0", "100", "0", "--batch-size", "4"]
    how += ["--num-batches", str(4 * stages), "--stages", str(stages), "--progress"]
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / out)]
    return [sys.executable, "-m", "flexgen_jax", "batch", *model, *how, *files]


def texts(folder: Path, out: str, stages: int) -> dict[str, list[int]]:
    """Runs a job to its end; returns the tokens that its file has, by request."""
    subprocess.run(command(folder, out, stages), check=True, stderr=subprocess.DEVNULL)
    records = map(json.loads, (folder / out).read_text().splitlines())
    return {record["id"]: record["token_ids"] for record in records}


def said_until(process: subprocess.Popen[bytes], pattern: re.Pattern[str]) -> None:
    """Reads a process's stderr until a pattern matches."""
    assert process.stderr is not None
    said = ""
    while not pattern.search(said):
        part = os.read(process.stderr.fileno(), 1 << 16)
        if not part:
            sys.exit(f"the job ended too early: {said[-500:]}")
        said += part.decode(errors="replace")


def is_gone(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def disturbed(folder: Path, stages: int, stage: int, how: signal.Signals, phase: str) -> float:
    """Runs a job, and sends a stage a signal in a phase; returns the seconds until all processes
    have exited. Exits if the job does not end as it should."""
    process = subprocess.Popen(command(folder, "out.jsonl", stages), stderr=subprocess.PIPE)
    assert process.stderr is not None
    said_until(process, PHASES[phase])
    known = stage_processes(process.pid)
    started = time.monotonic()
    os.kill(known[stage], how)
    said = process.stderr.read().decode(errors="replace")
    code = process.wait()
    while not all(is_gone(number) for number in known.values()):
        time.sleep(0.05)
        if time.monotonic() - started > 2 * ALLOWED_S[how]:
            sys.exit(f"{how.name} in {phase}: processes are left behind")
    seconds = time.monotonic() - started
    last = said.strip().splitlines()[-1]
    if code != 1 or f"stage {stage} " not in last or seconds > ALLOWED_S[how]:
        sys.exit(f"{how.name} of stage {stage} in {phase}: {seconds:.1f} s, code {code}: {last}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_requests(folder / "in.jsonl", args.requests)
        whole = texts(folder, "whole.jsonl", args.stages)
        print("| signal | stage | phase | gone after s | resumed texts |")
        print("| --- | --- | --- | --- | --- |")
        for how, phase, stage in product(ALLOWED_S, PHASES, range(args.stages)):
            seconds = disturbed(folder, args.stages, stage, how, phase)
            found = texts(folder, "out.jsonl", args.stages)
            equal = sum(found.get(key) == value for key, value in whole.items())
            cells = [how.name, str(stage), phase, f"{seconds:.1f}", f"{equal} of {len(whole)}"]
            print("| " + " | ".join(cells) + " |", flush=True)
            if found != whole:
                sys.exit("the job that went on made other texts")
            for file in folder.glob("out.jsonl*"):
                file.unlink()


if __name__ == "__main__":
    main()
