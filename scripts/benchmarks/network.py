"""Runs two stages over a slow network, next to two independent runs (FlexGen, figure 4).

    python scripts/benchmarks/network.py --json result.json     as root: it makes network namespaces

Both stages have a core each, and two namespaces of this machine with a link whose rate is limited
(tc tbf). Delays are the link's (tc netem) where the kernel has that; elsewhere the second stage
waits before each shift, which delays the hidden states that come with it. The independent runs have
the same cores: two runs at once, each of the whole model and half of the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

KEY = "FLEXGEN_JAX_STAGE_KEY"
HOSTS = ("10.93.0.1", "10.93.0.2")
SPACES = ("flexgen-a", "flexgen-b")
LINKS = ("flexgen0", "flexgen1")
PORT = 4021


def shell(*words: str, is_tried: bool = False) -> bool:
    """Runs a command; returns whether it succeeded, which it must unless it is only tried."""
    found = subprocess.run(words, capture_output=True, text=True)
    if found.returncode and not is_tried:
        sys.exit(f"{' '.join(words)}: {found.stderr.strip()}")
    return found.returncode == 0


@contextmanager
def network(rate: str, delay_ms: float) -> Iterator[float]:
    """Links two namespaces; yields the seconds of delay that the kernel cannot make."""
    missing = 0.0
    try:
        for space in SPACES:
            shell("ip", "netns", "add", space)
        shell("ip", "link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for space, link, host in zip(SPACES, LINKS, HOSTS, strict=True):
            inside = ("ip", "netns", "exec", space)
            shell("ip", "link", "set", link, "netns", space)
            shell(*inside, "ip", "addr", "add", f"{host}/24", "dev", link)
            shell(*inside, "ip", "link", "set", link, "up")
            shell(*inside, "ip", "link", "set", "lo", "up")
            limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
            shell(*inside, "tc", "qdisc", "add", "dev", link, "root", "handle", "1:", *limit)
            delay = ("parent", "1:", "netem", "delay", f"{delay_ms}ms")
            if delay_ms and not shell(
                *inside, "tc", "qdisc", "add", "dev", link, *delay, is_tried=True
            ):
                missing = delay_ms / 1000
        yield missing
    finally:
        for space in SPACES:
            shell("ip", "netns", "del", space, is_tried=True)


def within(space: int, *words: str) -> list[str]:
    """Returns a command that runs in a namespace, on a core of its own, where the host's name is
    its address: that is where gloo listens."""
    named = f'hostname {HOSTS[space]} && exec "$0" "$@"'
    enter = ["ip", "netns", "exec", SPACES[space], "unshare", "--uts", "sh", "-c", named]
    return [*enter, "taskset", "-c", str(space), *words]


def bench(args: argparse.Namespace, sequences: int, folder: Path, name: str) -> list[str]:
    shape = ["--model", args.model, "--dummy-weights"] if args.model else []
    lengths = ["--prompt-len", str(args.prompt_len), "--gen-len", str(args.gen_len)]
    command = [sys.executable, "-m", "flexgen_jax", "bench", *shape, *lengths, "--no-progress"]
    command += ["--num-sequences", str(sequences), "--offload-dir", str(folder / name)]
    command += ["--device-memory", args.memory, "--host-memory", args.memory]
    return [*command, "--json", str(folder / f"{name}.json")]


def in_stages(args: argparse.Namespace, rate: str, delay_ms: float, folder: Path) -> dict[str, Any]:
    """Returns the report of a run in two stages."""
    with network(rate, delay_ms) as missing_s:
        secret = {**os.environ, KEY: secrets.token_hex(8)}
        address = f"{HOSTS[0]}:{PORT}"
        staged = ["--stages", "2", "--coordinator", address]
        command = [*bench(args, args.num_sequences, folder, "stages"), *staged]
        leader = subprocess.Popen(within(0, *command), env=secret)
        own = [sys.executable, __file__, "--as-stage", address, "--delay-s", str(missing_s)]
        other = subprocess.Popen(within(1, *own), env=secret)
        if leader.wait():
            other.kill()
            sys.exit("the run in stages failed")
        with suppress(subprocess.TimeoutExpired):
            other.wait(10)
        other.kill()
    found: dict[str, Any] = json.loads((folder / "stages.json").read_text())
    return found | {"rate": rate, "delay_ms": delay_ms, "delay_is_added": missing_s > 0}


def apart(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Returns the reports of two runs at once, each with half of the prompts."""
    runs = [
        subprocess.Popen(
            ["taskset", "-c", str(n), *bench(args, args.num_sequences // 2, folder, f"alone{n}")]
        )
        for n in (0, 1)
    ]
    codes = [run.wait() for run in runs]
    if any(codes):
        sys.exit("a run failed")
    return [json.loads((folder / f"alone{n}.json").read_text()) for n in (0, 1)]


def be_stage(address: str, delay_s: float) -> None:
    """Is the second stage, whose shifts begin later."""
    from flexgen_jax.engine.stages.worker import parse_address, work
    from flexgen_jax.offload.chain import Chain

    shift = Chain._shift

    def later(chain: Chain, number: int, size: int) -> None:
        time.sleep(delay_s)
        shift(chain, number, size)

    Chain._shift = later  # type: ignore[method-assign]
    work(parse_address(address), 1, os.environ[KEY])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="facebook/opt-1.3b", help='"" for the shipped one')
    parser.add_argument("--memory", default="2GB", help="of each process")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--num-sequences", type=int, default=32)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0, 10, 100])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-stage", help=argparse.SUPPRESS)
    parser.add_argument("--delay-s", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_stage:
        be_stage(args.as_stage, args.delay_s)
        return
    reports: list[dict[str, Any]] = []
    print("| network | token/s | prefill token/s | decode token/s |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        alone = apart(args, Path(name))
        reports += alone
        sums = [
            sum(report[key] for report in alone)
            for key in ("generation_throughput", "prefill_throughput", "decode_throughput")
        ]
        print("| none, two runs | " + " | ".join(f"{x:.2f}" for x in sums) + " |", flush=True)
        for rate in args.rates:
            for delay_ms in args.delays_ms:
                report = in_stages(args, rate, delay_ms, Path(name))
                reports.append(report)
                how = f"{rate}, {delay_ms:g} ms" + " (added)" * report["delay_is_added"]
                cells = [
                    f"{report[key]:.2f}"
                    for key in ("generation_throughput", "prefill_throughput", "decode_throughput")
                ]
                print(f"| {how} | " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
