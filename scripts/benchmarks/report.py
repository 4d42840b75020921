"""Formats the measurements of `benchmark.py` as tables."""

from __future__ import annotations

import statistics
from typing import Any

Row = dict[str, Any]
HEAD = "| {} | token/s | spread | times the reference | of the bound | bound by | predicted |"


def groups(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    """Groups the rows by case and by name, without those that searched the reference's best
    batch."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row["round"] != "search":
            found.setdefault(row["case"], {}).setdefault(row["name"], []).append(row)
    return found


def speeds(rows: list[Row]) -> list[float]:
    """Returns token/s of the runs that did not fail."""
    return [row["generation_throughput"] for row in rows if "failed" not in row]


def median(rows: list[Row]) -> float | None:
    found = speeds(rows)
    return statistics.median(found) if found else None


def reference_speed(case: dict[str, list[Row]]) -> float | None:
    """Returns the median token/s of the reference's runs."""
    return next((median(rows) for name, rows in case.items() if is_reference(name)), None)


def is_reference(name: str) -> bool:
    return name.startswith("reference")


def markdown(rows: list[Row]) -> str:
    """Formats a table for each case: medians, lowest to highest runs, and ratios of medians."""
    tables = []
    for name, case in groups(rows).items():
        lines = [HEAD.format(name), "| --- | --- | --- | --- | --- | --- | --- |"]
        reference = reference_speed(case)
        lines += [_line(run, found, reference) for run, found in case.items()]
        tried = [row for row in rows if row["case"] == name and row["round"] == "search"]
        if tried:
            lines += ["", "The reference's batches: " + ", ".join(_tried(row) for row in tried)]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _line(name: str, rows: list[Row], reference: float | None) -> str:
    speed = median(rows)
    if speed is None:
        why = " ".join(rows[0]["failed"].split())[-120:]
        return f"| {name} | failed: {why} | | | | | |"
    found = speeds(rows)
    cells = [name, f"{speed:.2f}", f"{min(found):.2f} to {max(found):.2f}"]
    is_ratio = reference is not None and not is_reference(name)
    cells.append(f"{speed / reference:.2f}" if is_ratio and reference else "")
    bounds = [row["of_bound"] for row in rows if "of_bound" in row]
    cells.append(f"{100 * statistics.median(bounds):.0f} %" if bounds else "")
    cells.append(rows[0].get("binding", "").replace("_", " "))
    predicted = rows[0].get("predicted")
    cells.append(f"{predicted['generation_throughput']:.2f}" if predicted else "")
    return "| " + " | ".join(cells) + " |"


def _tried(row: Row) -> str:
    speed = row.get("generation_throughput")
    what = row["name"].removeprefix("reference, ")
    return f"{what}: {speed:.2f}" if speed else f"{what}: {row['failed'].split(':')[0]}"
