"""Copies of a model as one engine: nothing is lost with a copy, and nothing is twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.jobs import fleet
from flexgen_jax.jobs.fleet import Copy, Fleet, LostError, News, Replica
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.options import JobOptions

TEXTS = ["The people of the United States", "It is", "In the year", "We have", "The debt"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "policy": Policy(batch_size=2, kv_block_tokens=8)}


class Here:
    """A copy in this process. lives: news that it tells before it is lost."""

    def __init__(self, name: str, lives: int | None = None) -> None:
        self.name, self._lives, self.given = name, lives, list[str]()
        self._replica = Replica(OPTIONS)

    def give(self, requests: Sequence[Request]) -> None:
        self.given += [request.id for request in requests]
        self._replica.give(requests)

    def news(self) -> News | None:
        found = self._replica.news(0.01)
        if self._lives is not None and found.unfinished:
            self._lives -= 1
            if self._lives < 0:
                self._replica.end()
                raise LostError("the power is gone")
        return found

    def end(self) -> None:
        self._replica.end()


class Crew:
    """Copies that are there, and others that take the places of lost ones."""

    def __init__(self, copies: Sequence[Here], others: Sequence[Here] = ()) -> None:
        self.there, self.others, self.why = list(copies), list(others), list[str]()

    def copies(self) -> Sequence[Copy]:
        if not self.there and not self.others:
            raise UserError("no machine is left")
        return list(self.there)

    def lost(self, copy: Copy, why: str) -> None:
        self.why.append(why)
        self.there = [one for one in self.there if one is not copy] + self.others[:1]
        self.others = self.others[1:]

    def close(self) -> None:
        for copy in self.there:
            copy.end()


def requests(count: int) -> Iterator[Request]:
    for number in range(count):
        params = SamplingParams(
            8 + 7 * number % 12,
            temperature=(0, 0.8)[number % 2],
            seed=number,
            logprobs=1 if number % 3 == 0 else None,
            ignore_eos=True,
        )
        yield Request(f"{number}.0", TEXTS[number % 5], sampling_params=params, place=number)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies tell of every token, and have few requests; all are ended when a test is."""
    made: list[Replica] = []
    begin = Replica.__init__

    def noted(replica: Replica, options: Any) -> None:
        made.append(replica)
        begin(replica, options)

    monkeypatch.setattr(Replica, "__init__", noted)
    monkeypatch.setattr(fleet, "TELL_S", 0.0)
    monkeypatch.setattr(fleet, "AT_FIRST", 3)
    yield
    for replica in made:
        replica.end()
    for thread in threading.enumerate():
        if thread.name == "flexgen-replica":
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as made:
        yield made


def test_texts_are_those_of_one_engine_though_copies_are_lost(llm: LLM) -> None:
    expected = {r.id: r for r in llm.stream(requests(9))}
    shown: dict[str, list[int]] = {}
    crew = Crew([Here("a", lives=3), Here("b")], [Here("c", lives=2), Here("d")])
    copies = [*crew.there, *crew.others]
    run = Fleet(crew).stream(
        requests(9), lambda name, token: shown.setdefault(name, []).append(token)
    )
    found = list(run)
    assert len(found) == 9
    for result in found:
        right = expected[result.id]
        assert (result.text, result.token_ids) == (right.text, right.token_ids)
        assert shown[result.id] == right.token_ids
        assert (result.logprobs is None) == (right.logprobs is None)
        pairs = zip(result.logprobs or [], right.logprobs or [], strict=True)
        assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)
    assert crew.why == ["the power is gone"] * 2
    assert len({name for copy in copies for name in copy.given}) == 9
    assert sum(len(copy.given) for copy in copies) > 9


def test_a_request_that_ends_every_copy_has_an_error(llm: LLM) -> None:
    crew = Crew([Here(str(n), lives=0) for n in range(3)], [Here("d")])
    only = [next(requests(1))]
    (found,) = Fleet(crew).stream(only)
    assert found.finish_reason == "error"
    assert "3 processes ended" in (found.error or "")


def test_without_any_machine_the_job_says_so(llm: LLM) -> None:
    run = Fleet(Crew([Here("a", lives=0)])).stream(requests(5))
    with pytest.raises(UserError, match="no machine is left"):
        list(run)


def test_a_replica_that_fails_says_why() -> None:
    replica = Replica({**OPTIONS, "policy": Policy(batch_size=2), "device_memory": 1})
    replica.give(list(requests(1)))
    found = replica.news(60)
    assert "does not fit" in (found.error or "")


def test_a_job_has_each_record_once(llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"id": str(n), "prompt": TEXTS[n % 5], "max_tokens": 12 + n} for n in range(9)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = []
    for name, runner in (
        ("one", llm),
        ("many", Fleet(Crew([Here("a", lives=3), Here("b")], [Here("c")]))),
    ):
        options = JobOptions(source, tmp_path / name, journal_s=0.1)
        summary = Job(llm, options, runner).run()
        assert (summary.finished, summary.errors) == (9, 0)
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        records.append({row["id"]: row["text"] for row in rows})
        assert len(rows) == 9
    assert records[0] == records[1]
