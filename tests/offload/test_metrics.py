"""Tests counters and traces against operations whose times are known."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.cli.bench import breakdown_table
from flexgen_jax.errors import UserError
from flexgen_jax.offload.metrics import LINKS, Metrics
from flexgen_jax.offload.trace import Trace
from flexgen_jax.offload.watcher import Watcher

Clock = Callable[[float], None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Returns a function that sets the time that the counters see."""
    now = 0.0

    def at(seconds: float) -> None:
        nonlocal now
        now = seconds

    monkeypatch.setattr("flexgen_jax.offload.metrics.time.perf_counter", lambda: now)
    return at


def run_known(metrics: Metrics, clock: Clock) -> None:
    """Runs operations at known seconds: weights 0 to 4 and 1 to 5, cache 3 to 6 (prefill); weights
    7 to 9 (decode), cache queued."""
    first = metrics.begin("disk_read", "weights", "layer 0", 100)
    clock(1)
    second = metrics.begin("disk_read", "weights", "layer 1", 20)
    clock(3)
    third = metrics.begin("disk_read", "cache", "cache 0", 3)
    for at, operation in ((4, first), (5, second), (6, third)):
        clock(at)
        metrics.end(operation)
    metrics.enter("decode")
    clock(7)
    fourth = metrics.begin("disk_read", "weights", "layer 2", 1000)
    queued = metrics.queue("disk_read", "cache", "cache 1", 7)
    clock(8)
    metrics.start(queued)
    clock(9)
    metrics.end(fourth)
    metrics.end(queued)


def test_breakdown_counts_each_part_while_it_runs(clock: Clock) -> None:
    metrics = Metrics()
    run_known(metrics, clock)
    report = metrics.report()
    found = {
        (row["phase"], row["content"]): (row["bytes"], row["busy_s"]) for row in report["breakdown"]
    }
    assert found == {
        ("prefill", "weights"): (120, 5.0),
        ("prefill", "cache"): (3, 3.0),
        ("decode", "weights"): (1000, 2.0),
        ("decode", "cache"): (7, 1.0),
    }
    assert report["busy_s"]["disk_read"] == 8.0  # 0 to 6 and 7 to 9, not the sum of the parts
    assert report["bytes"]["disk_read"] == 1130
    assert report["decode_bytes"]["disk_read"] == 1007


def test_operations_begun_before_a_reset_do_not_count(clock: Clock) -> None:
    metrics = Metrics(is_timed=True)
    old = metrics.begin("compute", "layers", "old")
    metrics.reset()
    new = metrics.begin("compute", "layers", "new")
    clock(2)
    metrics.end(old)
    clock(3)
    metrics.end(new)
    assert metrics.report()["busy_s"]["compute"] == 3.0


def spans(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append(event)
    return rows


def test_trace_has_each_operation_once_and_rows_without_overlap(
    clock: Clock, tmp_path: Path
) -> None:
    trace = Trace(tmp_path / "trace.json")
    run_known(Metrics(trace), clock)
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {
        (names[tid], event["name"], event["ts"], event["dur"])
        for tid, row in spans(events).items()
        for event in row
    }
    assert found == {
        ("disk read: weights", "layer 0", 0, 4e6),
        ("disk read: weights (2)", "layer 1", 1e6, 4e6),
        ("disk read: cache", "cache 0", 3e6, 3e6),
        ("disk read: weights", "layer 2", 7e6, 2e6),
        ("disk read: cache", "cache 1", 8e6, 1e6),
    }


def test_trace_of_a_killed_run_is_complete_but_for_its_bracket(
    clock: Clock, tmp_path: Path
) -> None:
    trace = Trace(tmp_path / "trace.json")
    run_known(Metrics(trace), clock)
    trace._file.flush()
    text = (tmp_path / "trace.json").read_text()
    assert sum(len(row) for row in spans(json.loads(text + "]")).values()) == 5
    trace.close()


def test_trace_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write --trace .*No such file"):
        Trace(tmp_path / "missing" / "trace.json")


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path) -> None:
    trace = Trace(Path("/dev/full"))
    metrics = Metrics(trace)
    for _ in range(2000):  # more than the file's buffer holds
        metrics.end(metrics.begin("disk_read", "weights", "x", 1))
    assert metrics.report()["bytes"]["disk_read"] == 2000
    with pytest.raises(UserError, match="No space left"):
        trace.close()
    trace.close()


def test_watcher_ends_operations_whose_computation_failed() -> None:
    class Broken:
        def block_until_ready(self) -> None:
            raise RuntimeError("no")

    metrics = Metrics(is_timed=True)
    watcher = Watcher(metrics)
    for resource in ("compute", "host_to_device"):
        watcher.follow(metrics.queue(resource, "layers", "x"), None, Broken())
    watcher.close()
    assert metrics._whole["compute"].active == metrics._whole["host_to_device"].active == 0


def test_a_run_is_broken_down_and_traced(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    policy = Policy.from_percent(30, 40, 30, 40, 50, 0, batch_size=2, num_batches=2)
    path = tmp_path / "trace.json"
    with LLM(
        checkpoint(),
        policy=policy,
        dtype="float32",
        unified=False,
        trace=path,
        offload_dir=tmp_path / "offload",
    ) as llm:
        llm.generate(
            prompt_token_ids=[[5, 6, 7]] * 4,
            sampling_params=SamplingParams(max_tokens=4, ignore_eos=True),
        )
        report = llm.report()
    rows = report["breakdown"]
    for link in LINKS:
        parts = [row["bytes"] for row in rows if row["resource"] == link]
        assert sum(parts) == report["bytes"][link] > 0
    events = json.loads(path.read_text())
    for row in spans(events).values():
        for before, after in pairwise(row):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.11  # rounded to 0.1 us
    computed = {e["name"] for row in spans(events).values() for e in row if ", token " in e["name"]}
    layers = llm.config.num_layers + 2
    steps = {name for name in computed if "(projection)" not in name and "ranked" not in name}
    assert len(steps) == 2 * layers * 4  # batches, layers, tokens
    table = breakdown_table(report).splitlines()
    assert len(table) == 3 + len({(row["resource"], row["content"]) for row in rows})
    for phase, busy_s in report["any_busy_s"].items():
        each = [row["busy_s"] for row in rows if row["phase"] == phase]
        assert max(each) <= busy_s + 1e-9 and busy_s <= sum(each) + 1e-9
