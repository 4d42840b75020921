"""Runs a job on a Ray cluster of two nodes here, kills a copy of the model midway, adds a node, and
compares the records with those of a job without Ray.

    pip install -e '.[ray]' && python scripts/checks/check_ray.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TEXTS = ["The people of the United States", "It is", "In the year", "We have", "The debt"]
COPY = "ray::Replica"
"""The beginning of the title of an actor's process."""


def copies() -> list[int]:
    """Returns the processes of all copies."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                title = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(COPY.encode()):
                found.append(int(folder.name))
    return found


def command(source: Path, results: Path, *more: str) -> list[str]:
    flags = ["--dtype", "float32", "--batch-size", "16", "--num-batches", "2", *more]
    return [sys.executable, "-m", "flexgen_jax", "batch", "-i", source, "-o", results, *flags]


def records(results: Path) -> dict[str, dict[str, object]]:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    found = {row["id"]: row for row in rows}
    if len(found) != len(rows):
        sys.exit(f"{len(rows) - len(found)} ids are there twice")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    from ray.cluster_utils import Cluster  # an extra, of this script alone

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, many, one = (folder / file for file in ("in.jsonl", "many.jsonl", "one.jsonl"))
        with open(source, "w") as file:
            for number in range(args.requests):
                line = {
                    "id": f"r{number}",
                    "prompt": TEXTS[number % 5],
                    "max_tokens": 4 + 11 * number % 29,
                    "temperature": (0, 0.8)[number % 2],
                    "ignore_eos": True,
                }
                file.write(json.dumps(line) + "\n")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
        started = time.monotonic()
        job = subprocess.Popen(command(source, many, "--ray", cluster.address))
        while job.poll() is None and not (
            many.exists() and len(many.read_text().splitlines()) > args.requests // 4
        ):
            time.sleep(0.2)
        there = copies()
        print(f"{len(there)} copies; one is killed, and a node is added", flush=True)
        os.kill(there[0], signal.SIGKILL)
        cluster.add_node(num_cpus=1)
        most = 0
        while job.poll() is None:
            most = max(most, len(copies()))
            time.sleep(0.2)
        print(f"with code {job.wait()} after {time.monotonic() - started:.0f} s; {most} copies")
        cluster.shutdown()
        subprocess.run(command(source, one), check=True)
        found, expected = records(many), records(one)
        different = [name for name in expected if found.get(name) != expected[name]]
        print(f"{len(found)} of {len(expected)} ids, {len(different)} different records")
        sys.exit(bool(different) or job.returncode != 0)


if __name__ == "__main__":
    main()
