"""Kills jobs at random moments (SIGKILL), lets them go on, and compares them with whole ones.

    python scripts/checks/check_kills.py --runs 200

Each run is killed once or twice between its start and its usual end, and then resumed until it is
finished. Every line must have exactly one record, with the tokens, the texts and, to 1e-4, the
log-probabilities of a job that nobody killed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

INTERVAL_S = 0.5
TEXTS = ["The people of the United States", "It is", "In the year", "We have", "The debt"]


def lines(count: int) -> list[dict[str, Any]]:
    """Requests of both forms, some sampled, some with log-probabilities, penalties or two texts."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        body = {
            "prompt": TEXTS[number % 5],
            "max_tokens": 20 + 17 * number % 90,
            "temperature": [0, 0, 0.8][number % 3],
            "logprobs": [None, 2][number % 2],
            "presence_penalty": [0, 0, 0, 0.7][number % 4],
            "n": 1 + (number % 5 == 0),
        }
        if number % 2:
            found.append({"id": f"p{number}", **body})
        else:
            url = "/v1/completions"
            found.append({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body})
    return found


def command(folder: Path) -> list[str]:
    flags = ["--dtype", "float32", "--batch-size", "4", "--num-batches", "2"]
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    more = ["--journal-interval", str(INTERVAL_S), "--json", str(folder / "report.json")]
    return [sys.executable, "-m", "flexgen_jax", "batch", *files, *flags, *more]


def run(folder: Path, kill_after: float | None = None) -> bool:
    """Runs a job, or kills it after some seconds; returns whether it came to its end."""
    process = subprocess.Popen(command(folder), stderr=subprocess.PIPE)
    try:
        _, said = process.communicate(timeout=kill_after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    if process.returncode:
        raise SystemExit(f"exit status {process.returncode}: {said.decode()}")
    return True


def records(folder: Path) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for content in (folder / "out.jsonl").read_text().splitlines():
        record = json.loads(content)
        if record["line"] in found:
            raise SystemExit(f"line {record['line']} has two records")
        if record.get("response"):
            record["response"]["body"].pop("created")
        found[record["line"]] = record
    return found


def differs(one: Any, other: Any) -> bool:
    """Whether two records differ in more than 1e-4 of a number that is not whole."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differs(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(differs, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) > 1e-4
    return bool(one != other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    content = "".join(json.dumps(line) + "\n" for line in lines(args.lines))
    wrong = kills = runs = number = 0
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        whole.mkdir()
        (whole / "in.jsonl").write_text(content)
        run(whole)  # compiles
        (whole / "out.jsonl").unlink()
        started = time.monotonic()
        run(whole)
        usual_s, expected = time.monotonic() - started, records(whole)
        report = json.loads((whole / "report.json").read_text())["summary"]
        rate = report["tokens"] / report["seconds"]
        print(f"a whole job: {usual_s:.1f} s, {report['tokens']} tokens", flush=True)
        while runs < args.runs:
            number += 1
            rng = random.Random(args.seed + number)  # noqa: S311 - no secret
            folder = Path(name) / str(number)
            folder.mkdir()
            (folder / "in.jsonl").write_text(content)
            before = kills
            for _ in range(rng.randint(1, 2)):
                started = time.monotonic()
                is_whole = run(folder, rng.uniform(0.1, 1.0) * usual_s)
                kills += not is_whole
                if is_whole:  # the machine is less busy than it was
                    usual_s = min(usual_s, time.monotonic() - started)
            runs += kills > before
            run(folder)
            found = records(folder)
            bad = [line for line in expected if differs(found.get(line), expected[line])] + [
                line for line in found if line not in expected
            ]
            wrong += bool(bad)
            summary = json.loads((folder / "report.json").read_text())["summary"]
            print(
                f"{runs}: {'wrong ' + str(bad) if bad else 'right'}; the last run took up "
                f"{summary['taken_up']} tokens and made {summary['tokens']}",
                flush=True,
            )
    print(f"{runs} runs that were killed, {kills} kills: {wrong} wrong; {rate:.0f} token/s")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
