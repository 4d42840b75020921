"""Compares two stages of one core and 2.5 GB each with one process of one core and 2.5 GB.

    python scripts/benchmarks/two_stages.py --json result.json    as root: it makes memory cgroups

OPT-1.3B's shape in 16 bits: half of its layers fit into 2.5 GB, the whole model does not. Both
sides choose their own plans. Each stage has a cgroup of its own, page cache included. The machine
is measured first, by two processes at once that have a core and 2.5 GB each, as stages have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from limits import drop_page_cache, entering, memory_cgroup

LIMIT = 25 * 10**8
BENCH = ("--model", "facebook/opt-1.3b", "--dummy-weights", "--prompt-len", "128")


def stage_processes(leader: int) -> dict[int, int]:
    """Returns the processes of the stages that a process has started, by number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == leader and b"stage" in words:
            found[int(words[words.index(b"--number") + 1])] = int(folder.name)
    return found


def on_core(core: int, group: Path) -> list[str]:
    """Returns the beginning of a command that runs on one core, in a cgroup."""
    return ["taskset", "-c", str(core), *entering(group)]


def measure(offload: Path) -> None:
    """Measures the machine as two stages find it; runs take the profile from the cache."""
    command = [sys.executable, "-m", "flexgen_jax", "profile", "--dtype", "bfloat16"]
    command += ["--offload-dir", str(offload)]
    with ExitStack() as stack:
        groups = [stack.enter_context(memory_cgroup(LIMIT)) for _ in range(2)]
        both = [
            subprocess.Popen([*on_core(core, group), *command], stdout=subprocess.DEVNULL)
            for core, group in enumerate(groups)
        ]
        codes = [one.wait() for one in both]
        if any(codes):
            sys.exit("the machine cannot be measured")


def run(stages: int, flags: list[str], offload: Path) -> dict[str, Any]:
    """Returns the report of a run; each of its processes that compute has its own core."""
    drop_page_cache()
    report = offload / f"report-{stages}.json"
    command = [sys.executable, "-m", "flexgen_jax", "bench", *BENCH, *flags]
    command += ["--offload-dir", str(offload), "--json", str(report), "--no-progress"]
    with ExitStack() as stack:
        groups = [stack.enter_context(memory_cgroup(LIMIT)) for _ in range(stages)]
        if stages == 1:
            subprocess.run([*on_core(0, groups[0]), *command], check=True)
        else:
            ram = ["--stages", str(stages), "--device-memory", "2.5GB", "--host-memory", "2.5GB"]
            leader = subprocess.Popen([*command, *ram])
            while len(known := stage_processes(leader.pid)) < stages and leader.poll() is None:
                time.sleep(0.01)
            for number, process in known.items():
                (groups[number] / "cgroup.procs").write_text(str(process))
            if leader.wait():
                sys.exit("the run in stages failed")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-sequences", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("this takes two cores")
    print("| sequences | stages | prefill token/s | decode token/s | waited | predicted s | s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    reports = []
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        measure(Path(name))
        for count in args.num_sequences:
            flags = ["--num-sequences", str(count), "--gen-len", str(args.gen_len)]
            for stages in (1, 2):
                report = run(stages, flags, Path(name))
                reports.append(report)
                waited = [one["waited_s"] / one["total_s"] for one in report.get("stages", [])]
                predicted = report["predicted"]
                cells = [
                    str(count),
                    str(stages),
                    f"{report['prefill_throughput']:.1f}",
                    f"{report['decode_throughput']:.2f}",
                    f"{max(waited):.0%}" if waited else "",
                    f"{predicted['total_s']:.1f}" if predicted else "",
                    f"{report['total_s']:.1f}",
                ]
                print("| " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
