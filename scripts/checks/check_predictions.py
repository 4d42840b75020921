"""Compares predicted with measured times of eight policies, and of the automatic one.

    python scripts/checks/check_predictions.py --folder /ssd/check --json result.json

Measures the machine, predicts, and runs `flexgen-jax bench` once for each policy, each in its own
process: OPT-1.3B's shape with random weights, 64 sequences. Also compares the computed with the
measured peaks of every tier.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flexgen_jax.policy.policy import Policy

MODEL, PROMPT, GEN, SEQUENCES = "facebook/opt-1.3b", 128, 32, 64
MEMORY = "6GB"
"""Limit of the device's memory, and of the host's, for all runs."""


def policies() -> dict[str, Policy]:
    """Returns the policies by name: disk and host weights, KV cache in every tier, 16 and 4 bits,
    three batch shapes."""

    def of(*percent: float, **options: Any) -> Policy:
        return Policy.from_percent(*percent, **{"batch_size": 16, "num_batches": 4, **options})

    four = {"weight_bits": 4, "cache_bits": 4}
    return {
        "all on the device": of(100, 0, 100, 0, 100, 0),
        "weights and cache on the host": of(0, 100, 0, 100, 100, 0),
        "the same, 32 x 2": of(0, 100, 0, 100, 100, 0, batch_size=32, num_batches=2),
        "weights on disk, cache on the host": of(0, 0, 0, 100, 100, 0),
        "half the weights on disk, 8 x 8": of(50, 0, 50, 50, 100, 0, batch_size=8, num_batches=8),
        "weights and cache on disk": of(0, 0, 0, 0, 100, 0),
        "4 bits on the host, 32 x 2": of(
            0, 100, 0, 100, 100, 0, batch_size=32, num_batches=2, **four
        ),
        "4 bits on disk": of(0, 0, 0, 0, 100, 0, **four),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be used")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the policies to run")
    parser.add_argument("--keep-profile", action="store_true", help="use the cached one")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.keep_profile:
        run(["profile", "--offload-dir", str(args.folder)])
    rows = []
    chosen = list(policies().items())
    for number in args.only if args.only is not None else range(len(chosen) + 1):
        name, policy = chosen[number] if number < len(chosen) else ("auto", None)
        rows.append(row(args.folder, name, policy))
        print(text(rows[-1]), flush=True)
    eight = [r for r in rows if r["name"] != "auto"]
    errors = [abs(r["error"]) for r in eight] or [0.0]
    summary = {"mean_error": sum(errors) / len(errors), "largest_error": max(errors)}
    fixed = [r["generation_throughput"] for r in eight]
    automatic = [r["generation_throughput"] for r in rows if r["name"] == "auto"]
    if automatic and fixed:
        summary["auto_over_best"] = automatic[0] / max(fixed)
    print(summary)
    if args.json:
        args.json.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")


def run(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "flexgen_jax", *arguments], check=True)


def row(folder: Path, name: str, policy: Policy | None) -> dict[str, Any]:
    """Runs `bench` once; returns a row made from its report."""
    result = folder / "report.json"
    command = ["bench", "--model", MODEL, "--dummy-weights", "--dtype", "bfloat16"]
    command += ["--prompt-len", str(PROMPT), "--gen-len", str(GEN)]
    command += ["--num-sequences", str(SEQUENCES), "--offload-dir", str(folder)]
    command += ["--device-memory", MEMORY, "--host-memory", MEMORY, "--json", str(result)]
    if policy is not None:
        file = folder / "policy.json"
        file.write_text(policy.to_json())
        command += ["--policy", str(file)]
    os.sync()
    run(command)
    report = json.loads(result.read_text())
    keys = ("total_s", "prefill_s", "decode_s", "generation_throughput", "predicted", "policy")
    keys += ("peak_bytes", "computed_peak_bytes", "compiled_workspace_bytes", "busy_s")
    keys += ("storage_read_bytes",)
    found = {"name": name, **{key: report[key] for key in keys}}
    return found | {"error": report["predicted"]["total_s"] / report["total_s"] - 1}


def text(row: dict[str, Any]) -> str:
    predicted = row["predicted"]
    peaks = ", ".join(
        f"{tier} {row['peak_bytes'][tier] / 1e9:.2f}/{row['computed_peak_bytes'][tier] / 1e9:.2f}"
        for tier in row["peak_bytes"]
    )
    return (
        f"| {row['name']} | {predicted['prefill_s']:.1f} + {predicted['decode_s']:.1f} | "
        f"{row['prefill_s']:.1f} + {row['decode_s']:.1f} | {100 * row['error']:+.0f} % | "
        f"{row['generation_throughput']:.1f} | {peaks} |"
    )


if __name__ == "__main__":
    main()
