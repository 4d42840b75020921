"""Prefixes that prompts share are found and computed once, and change no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.requests.prefix_sharing import MIN_SAVED_TOKENS, share
from flexgen_jax.requests.prefixes import padded_prefix
from flexgen_jax.requests.requests import MIN_PREFIX_TOKENS, EncodedRequest
from tests.helpers.numpy_opt import reference

pytestmark = pytest.mark.usefixtures("sharing_pays")

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def asked() -> list[list[int]]:
    """Questions about two documents after one instruction, in turn, and two prompts of others."""
    rng = np.random.default_rng(11)

    def some(count: int) -> list[int]:
        return rng.integers(4, 96, count).tolist()

    instruction, documents = some(20), (some(23), some(30))
    questions = [[*instruction, *documents[n % 2], *some(1 + n % 5)] for n in range(9)]
    return [*questions[:4], some(3), *questions[4:], some(30)]


def test_several_texts_of_one_prompt_compute_it_once(checkpoint: Callable[[], Path]) -> None:
    ids = [*asked()[1], *asked()[0][:30]]
    params = SamplingParams(n=5, max_tokens=4, temperature=1.0, ignore_eos=True)
    found, computed = [], []
    for shares in (True, False):
        policy = Policy(batch_size=3, num_batches=2)
        with LLM(checkpoint(), dtype="float32", policy=policy, prefix_sharing=shares) as llm:
            (result,) = llm.generate(prompt_token_ids=[ids], sampling_params=params)
            computed.append(llm.report()["prompt_tokens"])
        found.append([result.token_ids, *(text.token_ids for text in result.others)])
    assert found[0] == found[1]
    assert computed == [len(ids) + 4, 5 * len(ids)]


def test_a_stream_goes_on_with_other_prefixes(checkpoint: Callable[[], Path]) -> None:
    """Requests with further prefixes enter beside those under way, and a prefix is kept as
    long as requests wait that have it."""
    rng, model = np.random.default_rng(5), reference(checkpoint())
    prefixes = [rng.integers(4, 96, 40).tolist() for _ in range(6)]
    rows = [[*prefixes[n // 8], *rng.integers(4, 96, 2).tolist()] for n in range(48)]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    computed, order = 0, list[str]()

    def requests() -> Iterator[Request]:
        for number, ids in enumerate(rows):
            yield Request(str(number), None, ids, params)

    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=4, num_batches=2)) as llm:
        for result in llm.stream(requests()):
            assert result.token_ids == model.greedy(rows[int(result.id)], 3)
            order.append(result.id)
        computed = llm.report()["prompt_tokens"]
    assert len(order) == 48
    assert computed < 0.4 * sum(map(len, rows))


def test_no_request_waits_for_ever_for_room(checkpoint: Callable[[], Path]) -> None:
    """A plan of a stream has room for two prefixes; those with a third one go by themselves."""
    rng, done = np.random.default_rng(6), list[str]()
    prefixes = {kind: rng.integers(4, 96, 40).tolist() for kind in "abc"}

    def requests() -> Iterator[Request]:
        for number in range(2000):
            assert number < 400 or any(name.startswith("c") for name in done), "it starves"
            kind = "c" if 20 <= number < 24 else "ab"[number // 8 % 2]
            ids = [*prefixes[kind], *rng.integers(4, 96, 2).tolist()]
            yield Request(f"{kind}{number}", None, ids, SamplingParams(max_tokens=2))

    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=2, num_batches=2)) as llm:
        stream = llm.stream(requests())
        for result in stream:
            done.append(result.id)
            if sum(name.startswith("c") for name in done) == 4:
                break
        stream.close()
    assert len(done) < 400


def test_prefixes_go_on_from_each_other(checkpoint: Callable[[], Path]) -> None:
    """Of three levels, with a plan of one row, and with one of many."""
    rng, model = np.random.default_rng(8), reference(checkpoint())
    levels = [rng.integers(4, 96, 17).tolist() for _ in range(3)]
    starts = [[token for level in levels[: 1 + n % 3] for token in level] for n in range(15)]
    rows = [[*start, *rng.integers(4, 96, 3).tolist()] for start in starts]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for policy in (Policy(batch_size=1), Policy(batch_size=8)):
        with LLM(checkpoint(), dtype="float32", policy=policy) as llm:
            results = llm.generate(prompt_token_ids=rows, sampling_params=params)
            computed = llm.report()["prompt_tokens"]
        assert [result.token_ids for result in results] == [model.greedy(ids, 3) for ids in rows]
        assert computed == 3 * 17 + 15 * 3


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), TOKENS), min_size=1, max_size=20))
def test_what_is_shared(parts: list[tuple[int, int, list[int]]]) -> None:
    """Prefixes are those of several requests, worth a pass each, and one token short of each."""
    rows = [(*[a] * 30, *[3 + b] * 25, *ids) for a, b, ids in parts]
    requests = [EncodedRequest(n, row, SamplingParams(), 1) for n, row in enumerate(rows)]
    shared = share(requests)
    assert [replace(r, shared=()) for r in shared] == requests
    users = Counter(ids for r in shared for ids in r.prefixes)
    for request in shared:
        before = 0
        for length in request.shared:
            assert before + MIN_PREFIX_TOKENS <= length < len(request.prompt_ids)
            count = users[request.prompt_ids[:length]]
            assert (length - before) * (count - 1) >= MIN_SAVED_TOKENS
            before = length
    wanted = Counter(row[:30] for row in rows)
    for request in shared:
        if wanted[request.prompt_ids[:30]] >= 4:
            assert request.shared


def test_known_prefixes_are_found() -> None:
    known, other = (5,) * 40, (6,) * 40
    rows = [(*known, 1, 2), (*other, 1), known, (*known, 3)]
    requests = [EncodedRequest(n, row, SamplingParams(), 1) for n, row in enumerate(rows)]
    assert [r.shared for r in share(requests, [known])] == [(40,), (), (), (40,)]


@given(st.integers(1, 100_000))
def test_prefixes_have_few_lengths(tokens: int) -> None:
    columns = padded_prefix(tokens)
    assert tokens <= columns <= max(tokens + 15, 1.13 * tokens)
