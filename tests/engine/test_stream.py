"""Requests that come one by one: `LLM.stream`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.engine.local import LocalRunner
from flexgen_jax.errors import UserError
from flexgen_jax.requests.feed import Feed

TEXTS = ["Once upon a time", "The", "A list of all things that there are:", "I", "Two and two"]


def request(number: int, **options: Any) -> Request:
    params = {"max_tokens": 1 + 5 * number % 17, "temperature": 0, "ignore_eos": True}
    return Request(
        f"r{number}", TEXTS[number % 5], sampling_params=SamplingParams(**params | options)
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", policy=Policy(batch_size=4, kv_block_tokens=8)) as made:
        yield made


def alone(llm: LLM, number: int) -> list[int]:
    asked = request(number)
    return llm.generate(asked.prompt, asked.sampling_params)[0].token_ids


def test_results_are_those_of_each_request_alone(llm: LLM) -> None:
    """Whatever runs beside it; every token is shown once, in order."""
    expected = {f"r{n}": alone(llm, n) for n in range(12)}
    shown: dict[str, list[int]] = {}
    results = list(
        llm.stream(
            map(request, range(12)), lambda name, token: shown.setdefault(name, []).append(token)
        )
    )
    assert {r.id: r.token_ids for r in results} == expected == shown
    assert {r.id: r.prompt for r in results} == {f"r{n}": TEXTS[n % 5] for n in range(12)}
    assert [r.id for r in results] != sorted(expected)


def test_a_text_may_be_longer_than_planned_for(llm: LLM) -> None:
    """It continues as another request, with what it needs, whatever runs next to it."""
    params = [
        SamplingParams(max_tokens=n, temperature=n % 2, logprobs=2, seed=3, ignore_eos=True)
        for n in (30, 3, 17, 8, 25)
    ]
    wanted = {f"r{n}": llm.generate(TEXTS[n], x)[0] for n, x in enumerate(params)}
    requests = [
        Request(f"r{n}", TEXTS[n], sampling_params=x, place=0) for n, x in enumerate(params)
    ]
    shown = Counter[str]()
    stream = llm.stream(iter(requests), lambda name, _: shown.update([name]), lengths=(16, 8))
    for result in stream:
        other = wanted[result.id]
        assert (result.token_ids, result.text) == (other.token_ids, other.text)
        assert result.finish_reason == "length"
        assert [x.logprob for x in result.logprobs or []] == pytest.approx(
            [x.logprob for x in other.logprobs or []], abs=1e-4
        )
        assert shown[result.id] == len(result.token_ids)
        del wanted[result.id]
    assert not wanted


def test_sampled_texts_depend_on_their_place_alone(llm: LLM) -> None:
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 9}
    texts = [TEXTS[n % 5] for n in range(9)]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
    expected = [r.token_ids for r in llm.generate(texts, params)]
    found = {r.id: r.token_ids for r in llm.stream(request(n, **options) for n in range(9))}
    assert [found[f"r{n}"] for n in range(9)] == expected


def test_a_prompt_may_have_several_texts(llm: LLM) -> None:
    """The first is that of a call for one; all differ, and are the same in every call."""
    drawn, greedy = (
        SamplingParams(8, temperature=1.0, seed=4, n=3),
        SamplingParams(8, temperature=0),
    )
    asked = TEXTS[:3]
    tokens: Counter[str] = Counter()
    mixed = llm.generate(
        asked, [drawn, greedy, drawn], on_token=lambda name, _: tokens.update([name])
    )
    one = llm.generate(asked, [replace(drawn, n=1), greedy, replace(drawn, n=1)])
    assert [result.token_ids for result in mixed] == [result.token_ids for result in one]
    assert [len(result.others) for result in mixed] == [2, 0, 2]
    texts = [tuple(x.token_ids) for r in (mixed[0], mixed[2]) for x in (r, *r.others)]
    assert len(set(texts)) == 6
    assert llm.generate(asked, drawn)[2] == mixed[2]
    assert {"0", "0.1", "0.2", "1", "2", "2.1", "2.2"} == set(tokens)
    (refused,) = llm.stream([Request("a", asked[0], sampling_params=drawn)])
    assert refused.error is not None and "n works in generate and chat" in refused.error


def test_impossible_requests_have_an_error_and_the_others_go_on(llm: LLM) -> None:
    asked = [
        request(0, max_tokens=60),  # is there still when its id comes again
        Request("both", "x", [5]),
        Request("neither"),
        Request("unknown", prompt_token_ids=[10**6]),
        Request("empty", prompt_token_ids=[]),
        Request("long", prompt_token_ids=[5] * llm.config.max_positions),
        request(3),
        request(0),
    ]
    results = list(llm.stream(asked))
    errors = {r.id: r.error for r in results if r.error is not None}
    assert all(r.finish_reason == "error" for r in results if r.error is not None)
    assert "either" in errors["both"] and "either" in errors["neither"]
    assert "1000000" in errors["unknown"] and "vocabulary" in errors["unknown"]
    assert "0 tokens" in errors["empty"]
    assert str(llm.config.max_positions) in errors["long"]
    assert "'r0'" in errors["r0"]
    good = {r.id: r.token_ids for r in results if r.error is None}
    assert good.pop("r0")[:1] == alone(llm, 0)
    assert good == {"r3": alone(llm, 3)}


@pytest.mark.slow
def test_a_longer_request_is_planned_for_when_it_comes(llm: LLM) -> None:
    texts = [request(n) for n in range(20)]
    texts += [
        Request(
            "long", prompt_token_ids=[7] * 150, sampling_params=SamplingParams(40, temperature=0)
        )
    ]
    found = {r.id: r.token_ids for r in llm.stream(texts)}
    params = SamplingParams(40, temperature=0)
    assert (
        found["long"]
        == llm.generate(prompt_token_ids=[[7] * 150], sampling_params=params)[0].token_ids
    )
    assert len(found) == 21


def test_an_endless_source_is_read_no_further_than_twice_what_is_live(llm: LLM) -> None:
    read = [0]

    def source() -> Iterator[Request]:
        for number in count():
            read[0] += 1
            yield request(number)

    results = llm.stream(source())
    ahead = 0
    for done, _ in enumerate(results, 1):
        ahead = max(ahead, read[0] - done)
        if done == 60:
            break
    results.close()  # type: ignore[attr-defined]
    assert ahead <= 16 + 4  # what is read before anything is known, and a batch
    assert alone(llm, 1), "the engine is free again"


def test_a_slow_source_holds_up_nothing(llm: LLM) -> None:
    """Results come while `next()` waits; what it raises comes after what was read is finished."""
    done = threading.Event()

    def source() -> Iterator[Request]:
        yield request(0)
        yield request(1)
        assert done.wait(60)
        raise OSError("the source is gone")

    results = llm.stream(source())
    found = {next(results).id, next(results).id}
    done.set()
    assert found == {"r0", "r1"}
    with pytest.raises(OSError, match="the source is gone"):
        next(results)


def test_a_cancelled_request_ends_with_what_it_has(llm: LLM) -> None:
    shown: list[str] = []

    def watch(name: str, _: int) -> None:
        shown.append(name)
        if shown.count("r5") == 3:
            llm.cancel("r5")

    asked = [request(1), request(5, max_tokens=60), request(3)]
    results = {r.id: r for r in llm.stream(asked, watch)}
    assert results["r5"].finish_reason == "cancelled"
    assert len(results["r5"].token_ids) == 3
    assert results["r3"].token_ids == alone(llm, 3)


def test_a_request_may_be_cancelled_before_its_stream_runs(llm: LLM) -> None:
    results = llm.stream([request(1), request(5), request(3)])
    llm.cancel("r5")
    found = {r.id: r for r in results}
    assert (found["r5"].finish_reason, found["r5"].token_ids) == ("cancelled", [])
    assert found["r3"].token_ids == alone(llm, 3)


def test_a_late_cancel_reaches_no_later_request_of_the_same_name(llm: LLM) -> None:
    finished = threading.Event()

    def source() -> Iterator[Request]:
        yield request(1)
        assert finished.wait(60)
        llm.cancel("r1")  # it is finished
        llm.cancel("r2")  # it is still to come
        yield request(1)
        yield request(2)

    reasons = []
    for result in llm.stream(source()):
        reasons.append((result.id, result.finish_reason))
        finished.set()
    assert sorted(reasons) == [("r1", "length"), ("r1", "length"), ("r2", "cancelled")]
    assert [r.finish_reason for r in llm.stream([request(2)])] == ["length"]


def test_a_cancelled_request_that_waits_is_not_computed(llm: LLM) -> None:
    """Four run together; the others wait for them."""

    def watch(_: str, __: int) -> None:
        for number in range(4, 12):
            llm.cancel(f"r{number}")

    asked = [request(number, max_tokens=12) for number in range(12)]
    shown: Counter[str] = Counter()

    def both(name: str, token: int) -> None:
        shown[name] += 1
        watch(name, token)

    found = {r.id: r for r in llm.stream(asked, both)}
    cancelled = [name for name, r in found.items() if r.finish_reason == "cancelled"]
    assert len(found) == 12 and len(cancelled) >= 7
    assert sum(name in shown for name in cancelled) <= 4


def test_one_run_at_a_time(llm: LLM) -> None:
    results = llm.stream([request(2), request(3)])
    next(results)
    with pytest.raises(UserError, match="already running"):
        llm.generate("x")
    results.close()  # type: ignore[attr-defined]
    assert alone(llm, 2)


def test_a_closed_feed_reads_no_more() -> None:
    read: list[int] = []

    def source() -> Iterator[int]:
        for number in count():
            read.append(number)
            yield number

    feed = Feed(source(), lambda value, index: (value, index), 3)
    assert feed.wait()
    while len(read) < 3:
        pass
    assert [*feed.take(2)] == [(0, 0), (1, 1)]
    feed.close()
    before = len(read)
    assert before <= 5
    feed.allow(100)
    while not feed.is_ended:
        pass
    assert len(read) <= before + 1


def test_a_little_longer_texts_need_no_other_plan(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first requests are known to differ; the last ones are longer than all of them."""
    opened: list[int] = []
    real = LocalRunner.open

    def opening(self: LocalRunner, policy: Policy, workload: Any, compiles: bool = False) -> None:
        opened.append(workload.gen_len)
        real(self, policy, workload, compiles)

    monkeypatch.setattr(LocalRunner, "open", opening)
    lengths = [*[3, 5] * 10, 9, 11]
    requests = [request(n, max_tokens=tokens) for n, tokens in enumerate(lengths)]
    results = {result.id: result for result in llm.stream(iter(requests))}
    assert [len(results[f"r{n}"].token_ids) for n in range(len(lengths))] == lengths
    assert opened == [64]


def test_an_ended_feed_gives_all_that_is_left() -> None:
    """So that they are planned for together."""
    feed = Feed(iter(range(5)), lambda value, index: value, 8)
    assert feed.wait()
    while not feed.is_ended:
        time.sleep(0.001)
    assert list(feed.take(2)) == [0, 1, 2, 3, 4]
    assert not feed.wait()
