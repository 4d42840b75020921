"""A job on a Ray cluster has the records of one without, where Ray is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ray_cluster = pytest.importorskip("ray.cluster_utils")


def records(source: Path, results: Path, *flags: str) -> dict[str, object]:
    command = [sys.executable, "-m", "flexgen_jax", "batch", "-i", str(source), "-o", str(results)]
    subprocess.run([*command, "--dtype", "float32", *flags], check=True, timeout=300)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_records_are_those_of_a_job_here(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [
        {"id": str(n), "prompt": "It is", "max_tokens": 2 + n % 5, "temperature": n % 2 * 0.8}
        for n in range(12)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    cluster = ray_cluster.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        there = records(source, tmp_path / "there.jsonl", "--ray", cluster.address)
    finally:
        cluster.shutdown()
    assert there == records(source, tmp_path / "here.jsonl")
