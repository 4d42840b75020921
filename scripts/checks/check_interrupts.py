"""Presses Ctrl-C at random moments of commands: each must end with status 130 within three seconds,
and without a traceback.

    python scripts/checks/check_interrupts.py [--times 50] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EARLIEST_S, LATEST_S = 0.05, 8.0
"""Moments of Ctrl-C. Earlier, Python itself is starting, without any of our code."""

LIMIT_S = 3.0


def commands(folder: Path) -> dict[str, list[str]]:
    """Returns the arguments of commands that run for longer than `LATEST_S`."""
    lines = (
        json.dumps({"id": str(n), "prompt": f"The people {n}", "max_tokens": 300})
        for n in range(2000)
    )
    (folder / "in.jsonl").write_text("\n".join(lines))
    return {
        "generate": ["generate", "--max-tokens", "400", *(f"The people {n}" for n in range(64))],
        "batch": ["batch", "-i", f"{folder}/in.jsonl", "-o", f"{folder}/out.jsonl"],
        "serve": ["serve", "--port", "0", "--files-dir", f"{folder}/files"],
        "profile": ["profile", "--offload-dir", f"{folder}/off"],
        "bench": ["bench", "--model", "facebook/opt-125m", "--dummy-weights"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, wrong = random.Random(options.seed), 0  # noqa: S311 - moments
    executable = Path(sys.executable).with_name("flexgen-jax")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "HOME": name, "XDG_CACHE_HOME": f"{name}/cache"}
        chosen = list(commands(folder).items())
        for number in range(options.times):
            command, arguments = chosen[number % len(chosen)]
            moment = rng.uniform(EARLIEST_S, LATEST_S)
            process = subprocess.Popen(
                [executable, *arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                encoding="utf-8",
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            time.sleep(moment)
            has_ended = process.poll() is not None
            began = time.perf_counter()
            if not has_ended:
                os.killpg(process.pid, signal.SIGINT)
            messages = process.communicate()[1]
            seconds = time.perf_counter() - began
            is_right = process.returncode == 130 and seconds < LIMIT_S
            is_right = has_ended or (is_right and "Traceback" not in messages)
            wrong += not is_right
            ended = "had ended" if has_ended else f"ended after {seconds:.1f} s"
            print(
                f"{command}, Ctrl-C after {moment:.2f} s: {ended}, status {process.returncode}"
                + ("" if is_right else f"  WRONG\n{messages[-2000:]}"),
                flush=True,
            )
    print(f"{wrong} of {options.times} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
