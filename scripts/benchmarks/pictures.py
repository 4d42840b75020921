"""Draws the measurements of `benchmark.py` and `flexgen-jax bench --trace`.

python scripts/benchmarks/pictures.py bars result.json --out throughput.png
python scripts/benchmarks/pictures.py frontier latency.json --out latency.png
python scripts/benchmarks/pictures.py utilisation trace.json --from 40 --seconds 2 --out use.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from report import groups, is_reference, median, speeds

OURS, REFERENCE = "tab:blue", "tab:gray"
BINS = 400
"""Time bins in the picture of utilisation."""


def draw_bars(content: dict[str, Any], axes: Any) -> None:
    """Draws medians of token/s, with whiskers from the lowest to the highest run."""
    cases = groups(content["runs"])
    labels, places, place = [], [], 0.0
    for case, runs in cases.items():
        for name, rows in runs.items():
            speed = median(rows)
            if speed is None:
                continue
            measured = speeds(rows)
            whiskers = [[speed - min(measured)], [max(measured) - speed]]
            is_range = len(measured) > 1
            color = REFERENCE if is_reference(name) else OURS
            axes.barh(place, speed, xerr=whiskers if is_range else None, color=color, capsize=3)
            axes.annotate(f" {speed:.1f}", (max(measured), place), va="center")
            label = name.replace("ours", "flexgen_jax").replace("reference", "Accelerate")
            labels.append(label if len(cases) == 1 else f"{case}: {label}")
            places.append(place)
            place += 1
        place += 0.6
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlabel("generated tokens per second")
    if len(cases) == 1:
        axes.set_title(f"{next(iter(cases))} of memory")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1)


def draw_frontier(content: dict[str, Any], axes: Any) -> None:
    """Draws throughput over the time that a block of sequences takes."""
    rows = [row for row in content["runs"] if "failed" not in row]
    for label, color, wanted in (("this project", OURS, False), ("reference", REFERENCE, True)):
        points = [
            (row["total_s"], row["generation_throughput"])
            for row in rows
            if is_reference(row["name"]) == wanted
        ]
        if points:
            seconds, speed = zip(*sorted(points), strict=True)
            axes.plot(seconds, speed, "o", color=color, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("seconds until all sequences are finished")
    axes.set_ylabel("token/s")
    axes.legend()


def draw_utilisation(events: list[dict[str, Any]], start: float, length: float, axes: Any) -> None:
    """Draws the utilization over time of each resource and content."""
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    first = min(e["ts"] for e in spans) / 1e6 + start
    edges = np.linspace(first, first + length, BINS + 1)
    busy: dict[str, np.ndarray] = {}
    for event in spans:
        name = tracks[event["tid"]].split(" (")[0]
        begin = event["ts"] / 1e6
        overlap = np.minimum(edges[1:], begin + event["dur"] / 1e6) - np.maximum(edges[:-1], begin)
        share = np.clip(overlap, 0, None) / (length / BINS)
        busy[name] = np.minimum(1.0, busy.get(name, 0.0) + share)
    names = sorted(name for name, share in busy.items() if share.any())
    for place, name in enumerate(names):
        middle = (edges[1:] + edges[:-1]) / 2 - first
        axes.fill_between(middle, place, place + 0.8 * busy[name], step="mid", color=OURS)
    axes.set_yticks([place + 0.4 for place in range(len(names))], names)
    axes.set_xlabel(f"seconds, from {start:g} s after the start")
    axes.set_xlim(0, length)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", choices=["bars", "frontier", "utilisation"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--from", dest="start", type=float, default=0.0, help="Seconds.")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--height", type=float, default=4.5, help="Inches.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    content = json.loads(args.file.read_text())
    figure, axes = plt.subplots(figsize=(9, args.height))
    if args.picture == "bars":
        draw_bars(content, axes)
    elif args.picture == "frontier":
        draw_frontier(content, axes)
    else:
        draw_utilisation(content, args.start, args.seconds, axes)
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
