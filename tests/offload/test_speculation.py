"""Guessed tokens change no text, wherever the data lie and however many guesses are right."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.drafting.lookup import MAX_LOOKUP_TOKENS, MIN_LOOKUP_TOKENS, LookupDrafter
from flexgen_jax.engine import drafting
from flexgen_jax.errors import UserError
from flexgen_jax.models.loading import Model
from flexgen_jax.offload.speculation import (
    PROBE,
    Acceptance,
    DraftedText,
    DraftedTexts,
    Draws,
    Pace,
)
from flexgen_jax.policy.drafts import DraftRates
from flexgen_jax.policy.policy import MAX_DRAFT
from tests.helpers.cases import examples
from tests.helpers.drafts import Scripted
from tests.helpers.models import BASE as OPT
from tests.helpers.models import PLACEMENTS, assert_within_plan, prompts, random_tensors

TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
CHOSEN = {
    "greedy": GREEDY,
    "sampled": SamplingParams(
        max_tokens=TOKENS, temperature=0.9, top_k=20, seed=5, ignore_eos=True
    ),
    "penalised": SamplingParams(
        max_tokens=TOKENS,
        temperature=0.7,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        no_repeat_ngram_size=3,
        min_tokens=9,
        logprobs=3,
    ),
}

Guessing = Callable[[Sequence[Sequence[int]], int], Scripted]


@pytest.fixture(autouse=True)
def memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs say of guesses is not the user's."""
    monkeypatch.setattr(drafting, "cache_folder", lambda name: tmp_path / name)


@pytest.fixture
def always_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made whatever they cost."""
    monkeypatch.setattr(Pace, "count", lambda pace: pace.most)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, always_guessing: None) -> Guessing:
    """Has texts guessed that are known."""

    def use(texts: Sequence[Sequence[int]], wrong: int) -> Scripted:
        script = Scripted(texts, wrong)
        monkeypatch.setattr(drafting, "LookupDrafter", lambda: script)
        return script

    return use


def model() -> Model:
    return Model.from_arrays(OPT, random_tensors(OPT))


def policy_of(percent: Sequence[float], **options: Any) -> Policy:
    fixed = {"batch_size": 3, "num_batches": 2, "kv_block_tokens": 8}
    return Policy.from_percent(*percent, **fixed | options)


def texts(params: SamplingParams, **options: Any) -> tuple[list[Any], Any]:
    """What becomes of prompts, and the run's report."""
    with LLM(model(), dtype="float32", **options) as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=params)
        report = llm.report()
    assert report is not None
    assert_within_plan(report)
    return [(r.token_ids, r.logprobs and [x.logprob for x in r.logprobs]) for r in results], report


@pytest.mark.parametrize(
    ("kind", "count", "rows"),
    [
        ("penalised", 4, 3),
        pytest.param("sampled", 8, 1, marks=pytest.mark.slow),
        pytest.param("greedy", 1, 3, marks=pytest.mark.slow),
    ],
)
def test_guesses_change_no_text(
    scripted: Guessing, tmp_path: Path, kind: str, count: int, rows: int
) -> None:
    params = CHOSEN[kind]
    plain, _ = texts(params, policy=Policy(batch_size=4))
    script = scripted([[*p, *ids] for p, (ids, _) in zip(prompts(), plain, strict=True)], wrong=5)
    policy = policy_of((30, 40, 20, 50, 0, 100), prefill_chunk=7, batch_size=rows)
    options = {"draft": "lookup", "draft_tokens": count, "offload_dir": tmp_path}
    guessed, report = texts(params, policy=policy, **options)
    for (ids, logprobs), (expected, others) in zip(guessed, plain, strict=True):
        assert ids == expected
        if others is not None:
            np.testing.assert_allclose(logprobs, others, atol=2e-5)
    drafts = report["drafts"]
    assert drafts["accepted"] > 0 and drafts["wrong"] > 0
    assert report["tokens_a_pass"] > 1.3
    assert script.begun >= len(prompts())
    assert script.closed == script.begun + 1  # once for all of them


@pytest.mark.usefixtures("always_guessing")
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_the_model_itself_in_4_bits_guesses_what_is_drawn(temperature: float) -> None:
    """It has the draws that the tokens will have, so that random texts are guessed as well."""
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=2, ignore_eos=True)
    plain, _ = texts(params, policy=policy_of(PLACEMENTS[2]))
    guessed, report = texts(params, policy=policy_of(PLACEMENTS[2]), draft="self-4bit")
    assert guessed == plain and report["tokens_a_pass"] > 2.5


def test_texts_end_amid_a_pass(scripted: Guessing) -> None:
    """By a stop string, an end token or the number of tokens; a cancelled one ends, too."""
    plain, _ = texts(GREEDY, policy=Policy(batch_size=4))
    ids = [made for made, _ in plain]
    scripted([[*p, *made] for p, made in zip(prompts(), ids, strict=True)], wrong=1000)
    policy = policy_of(PLACEMENTS[0])
    with LLM(model(), dtype="float32", policy=policy, draft="lookup", draft_tokens=8) as llm:
        wanted = []
        for n, prompt in enumerate(prompts()):
            end = ids[n][5 + n]
            params = SamplingParams(max_tokens=TOKENS, temperature=0, stop_token_ids=[end])
            wanted.append(Request(str(n), prompt_token_ids=prompt, sampling_params=params))
        for result in llm.stream(wanted):
            n = int(result.id)
            made = ids[n][: ids[n].index(ids[n][5 + n]) + 1]
            eos = [made.index(token) + 1 for token in (OPT["eos_token_id"],) if token in made]
            assert result.token_ids == made[: min([len(made), *eos])]
        short = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=short)
        assert [r.token_ids for r in results] == [made[:7] for made in ids]
        assert {r.finish_reason for r in results} == {"length"}


@pytest.mark.parametrize("unified", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_shared_and_kept_changes_no_text(
    scripted: Guessing, tmp_path: Path, unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix that prompts share, and what a KV store has of earlier texts."""
    rng = np.random.default_rng(3)
    begin = rng.integers(3, 96, 40).tolist()
    asked = [[*begin, *rng.integers(3, 96, 4 + n).tolist()] for n in range(3)]
    with LLM(model(), dtype="float32", policy=Policy(batch_size=3)) as llm:
        plain = llm.generate(prompt_token_ids=asked, sampling_params=GREEDY, prefix=begin)
    ids = [result.token_ids for result in plain]
    scripted([[*p, *made] for p, made in zip(asked, ids, strict=True)], wrong=4)
    policy = policy_of(PLACEMENTS[0], kv_block_tokens=4)
    options = {"policy": policy, "draft": "lookup", "unified": unified, "kv_store": "1GB"}
    for _ in range(2):
        with LLM(model(), dtype="float32", kv_store_dir=tmp_path / "kv", **options) as llm:
            results = llm.generate(prompt_token_ids=asked, sampling_params=GREEDY, prefix=begin)
            report = llm.report()
        assert [result.token_ids for result in results] == ids
        assert report is not None and report["tokens_a_pass"] > 1.5


@pytest.mark.slow
def test_json_of_a_schema(always_guessing: None) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
        "minItems": 6,
        "maxItems": 6,
    }
    params = SamplingParams(max_tokens=150, temperature=0.5, seed=1, json_schema=schema)
    made, passes = [], 1.0
    for draft in (None, "lookup"):
        with LLM(dtype="float32", policy=policy_of(PLACEMENTS[0]), draft=draft) as llm:
            (result,) = llm.generate(["A list of numbers:"], params)
            report = llm.report()
            assert report is not None
            passes = report["tokens_a_pass"]
        made.append(result.text)
        assert len(json.loads(result.text)) == 6
    assert made[0] == made[1] and passes > 1.5


# Looking up


@examples(60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.data())
def test_lookup_finds_what_followed_last_time(ids: list[int], count: int, data: Any) -> None:
    """The longest sequence of last tokens that was there before, at its latest place."""
    draft, draws = LookupDrafter().begin(), Draws((), 0)
    cut = data.draw(st.integers(1, len(ids)))
    draft.guess(ids[:cut], count, draws)  # in two steps
    guesses = list(draft.guess(ids, count, draws))
    expected: list[int] = []
    for size in range(min(MAX_LOOKUP_TOKENS, len(ids)), MIN_LOOKUP_TOKENS - 1, -1):
        ends = [n for n in range(size, len(ids)) if ids[n - size : n] == ids[-size:]]
        if ends:
            longer = list(ids)
            for _ in range(count):
                longer.append(longer[ends[-1] + len(longer) - len(ids)])
            expected = longer[len(ids) :]
            break
    assert guesses == expected
    draft.close()


# What is expected, and how many guesses are worth it


@given(st.floats(0, 0.99), st.integers(1, MAX_DRAFT))
def test_tokens_a_pass_are_those_of_a_simulation(rate: float, count: int) -> None:
    found = DraftRates(accepted=rate).tokens_a_pass(count)
    assert found == pytest.approx((1 - rate ** (count + 1)) / (1 - rate))


def paced(rate: float, guessing_s: float, plain_s: float, guess_s: float) -> Pace:
    """After 100 guesses that came after right ones."""
    right = round(100 * rate)
    pace = Pace(4, Acceptance(passes=50, accepted=right, wrong=100 - right))
    pace.guessing.extend([guessing_s, 10 * guessing_s])
    pace.plain.append(plain_s)
    pace.guess_s.append(guess_s)
    return pace


@pytest.mark.parametrize(
    ("rate", "guessing_s", "plain_s", "guess_s", "count"),
    [
        (0.6, 1.0, 1.0, 0.0, 4),  # weights stream, and looking up is free
        (0.1, 2.0, 1.0, 0.0, 0),  # few are right, and computing binds
        (0.6, 1.0, 1.0, 0.3, 1),  # a model's guesses take time
        (0.9, 1.0, 1.0, 0.1, 4),
        (0.0, 1.0, 1.0, 0.1, 0),
    ],
)
def test_as_many_are_guessed_as_are_worth_it(
    rate: float, guessing_s: float, plain_s: float, guess_s: float, count: int
) -> None:
    pace = paced(rate, guessing_s, plain_s, guess_s)
    counts = [pace.count() for _ in range(2 * PROBE)]
    assert counts.count(count) == 2 * PROBE - 2
    assert bool(counts[PROBE - 1]) != bool(count)  # to see whether it has changed


class Known:
    """Guesses that tokens count up."""

    def guess(self, ids: Sequence[int], count: int, draws: Draws) -> Sequence[int]:
        return range(ids[-1] + 1, ids[-1] + 1 + count)

    def close(self) -> None:
        pass


class Silent:
    def guess(self, ids: Sequence[int], count: int, draws: Draws) -> Sequence[int]:
        return ()

    def close(self) -> None:
        pass


def test_a_pass_without_guesses_computes_one_token() -> None:
    text = DraftedText(Silent(), ids=[5, 6, 7])
    texts = DraftedTexts(9, Pace(4, Acceptance()), [text], sampling=())
    text.take(8)
    assert texts.begin_pass().computed == 1 and texts.pass_ids.tolist() == [[8]]
    for token in (9, 10):  # as if a guess had been right
        text.take(token)
    texts.end_pass(1, unfinished=[0])
    begun = texts.begin_pass()
    assert (begun.known, begun.computed) == (2, 9)
    assert texts.pass_ids.tolist() == [[9, 10, *[10] * 7]] and text.first_place == 2


def test_rows_wait_for_the_one_that_knows_least() -> None:
    texts = DraftedTexts(
        *(5, Pace(2, Acceptance())), [DraftedText(Known(), ids=[0]) for _ in range(3)], sampling=()
    )
    for text in texts.rows:
        text.take(1)
    texts.end_pass(0, unfinished=[0, 1])  # the third one has all its tokens
    assert texts.begin_pass() == (1, 5)
    assert texts.pass_ids.tolist() == [[1, 2, 3, 3, 3], [1, 2, 3, 3, 3], [0] * 5]
    places = texts.found(np.array([[2, 3, 4, 0, 0], [7, 0, 0, 0, 0], [0] * 5]))
    assert places == [range(3), range(1), range(0)]
    for token in (2, 3, 4):
        texts.rows[0].take(token)
    texts.rows[1].take(7)
    texts.end_pass(1, unfinished=[0, 1])
    assert texts.begin_pass() == (1, 5)  # the first one has three known tokens, and two guesses
    assert texts.pass_ids.tolist() == [[2, 3, 4, 5, 6], [7, 8, 9, 9, 9], [0] * 5]
    assert texts.spread(np.arange(7)).tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 5, 5, 6, 6, 6, 6, 6]


# What is asked for


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": 3}, "draft_tokens"),
        ({"draft": "lookup", "draft_tokens": 99}, "from 0 to 16"),
        ({"draft": "lookup", "attention_sparsity": 0.5}, "attention_sparsity"),
        ({"draft": "lookup", "attention": "host"}, "attention on the device"),
        ({"draft": "lookup", "stages": 2}, "stages"),
        ({"draft": "self-4bit", "weight_bits": 4}, "few bits already"),
        ({"draft": "no/such-model"}, "no/such-model"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LLM(**options)


def test_other_tokens_are_refused() -> None:
    other = Model.from_arrays(OPT, random_tensors(OPT), name="another")
    with pytest.raises(
        UserError, match="another and tiny_opt have different vocabularies, of 96 and 4096"
    ):
        LLM(draft=other)
