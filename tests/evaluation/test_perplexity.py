"""Scores of continuations and perplexity of long texts, against NumPy and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax import LLM, Policy, UserError
from flexgen_jax.cli.main import main
from flexgen_jax.evaluation.perplexity import perplexity, windows
from flexgen_jax.requests.pairs import Split
from flexgen_jax.requests.requests import NOTHING
from tests.helpers.models import PLACEMENTS
from tests.helpers.numpy_llama import LLAMA, MIXTRAL, write
from tests.helpers.numpy_opt import NumpyOpt, reference

TEXT = [2, *np.random.default_rng(5).integers(4, 96, 250).tolist()]


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=4)) as made:
        yield made


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> NumpyOpt:
    return reference(checkpoint())


@given(st.integers(2, 40), st.data(), st.integers(0, 100))
def test_every_token_but_the_first_is_scored_once(size: int, data: st.DataObject, n: int) -> None:
    stride = data.draw(st.integers(1, size - 1))
    scored = []
    for window, count in windows(range(n), size, stride):
        assert window == list(range(window[0], window[0] + len(window))) and len(window) <= size
        assert count < len(window)
        if window[0]:
            assert len(window) - count >= size - stride
        scored += window[-count:]
    assert scored == list(range(1, n))


@pytest.mark.parametrize(("size", "stride"), [(97, None), (97, 1), (40, 13), (16, 15)])
def test_perplexity_is_that_of_numpy(
    llm: LLM, model: NumpyOpt, size: int, stride: int | None
) -> None:
    text = TEXT[: 30 + size]
    step, logprobs, end = stride or size // 2, [], 1
    for begin in range(0, len(text), step):
        last = min(begin + size, len(text))
        if last > end:
            logprobs += model.logprobs(text[begin:last])[end - last :].tolist()
        end = last
    assert len(logprobs) == len(text) - 1
    result = perplexity(llm, text, size, stride)
    assert result.tokens == len(text) - 1
    assert result.value == pytest.approx(math.exp(-np.mean(logprobs)), rel=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("through_cache", [False, True])
@pytest.mark.parametrize("percent", PLACEMENTS[1::2])
def test_continuations_are_scored_after_their_contexts(
    checkpoint: Callable[..., Path],
    model: NumpyOpt,
    percent: tuple[float, ...],
    through_cache: bool,
    tmp_path: Path,
) -> None:
    policy = Policy.from_percent(*percent, batch_size=3)
    contexts = [TEXT[:5], TEXT[:5], TEXT[3:40], TEXT[:93], TEXT[:200]]
    continuations = [TEXT[5:8], TEXT[50:51], TEXT[40:44], TEXT[93:97], TEXT[200:210]]
    pairs = list(zip(contexts, continuations, strict=True))
    with LLM(checkpoint(), dtype="float32", policy=policy, offload_dir=tmp_path) as llm:
        found = llm.score_pairs(contexts, continuations, through_cache=through_cache)
    for (context, continuation), score in zip(pairs, found, strict=True):
        row = [*context, *continuation][-97 + through_cache :]
        expected = model.logprobs(row)[-len(continuation) :]
        np.testing.assert_allclose(score.logprobs, expected, rtol=1e-4, atol=1e-4)
        assert score.token_ids == continuation
        assert score.total == pytest.approx(sum(expected), abs=1e-3)
        assert not score.is_greedy


def test_what_contexts_begin_with_is_computed_once(llm: LLM, model: NumpyOpt) -> None:
    contexts = [[*TEXT[:20], *TEXT[n : n + n % 7 + 1]] for n in range(30, 38)]
    continuations = [TEXT[n : n + 1 + n % 4] for n in range(50, 58)]
    for share in (8, 2):
        found = llm.score_pairs(contexts[:share], continuations[:share])
        assert llm.report()["prompt_tokens"] < sum(map(len, contexts[:share]))
        for context, continuation, score in zip(contexts, continuations, found, strict=False):
            expected = model.logprobs([*context, *continuation])[-len(continuation) :]
            np.testing.assert_allclose(score.logprobs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize("raw", [LLAMA, MIXTRAL], ids=["llama", "mixtral"])
@pytest.mark.parametrize("percent", PLACEMENTS[1::2])
def test_a_context_is_computed_once_for_its_continuations(
    raw: dict[str, Any], percent: tuple[float, ...], tmp_path: Path
) -> None:
    """Contexts of several lengths with two or three continuations each, of one to nine tokens, and
    one with a continuation alone."""
    rng = np.random.default_rng(0)
    model = write(tmp_path / "m", raw)
    contexts, continuations = [], []
    for tokens, counts in (
        (20, (1, 3, 8)),
        (31, (2, 8, 5)),
        (50, (9, 2)),
        (25, (4,)),
        (9, (3, 2, 1)),
    ):
        context = rng.integers(3, 96, tokens).tolist()
        contexts += [context] * len(counts)
        continuations += [rng.integers(3, 96, n).tolist() for n in counts]
    order = rng.permutation(len(contexts))
    contexts, continuations = ([x[n] for n in order] for x in (contexts, continuations))
    rows = [[*left, *right] for left, right in zip(contexts, continuations, strict=True)]
    split = Split.of(rows, [*map(len, continuations)], True, 96)
    assert (len(split.branched), len(split.alone)) == (2, 4)  # one context is too short
    policy = Policy.from_percent(*percent, batch_size=2)
    with LLM(tmp_path / "m", dtype="float32", policy=policy, offload_dir=tmp_path / "o") as llm:
        found = llm.score_pairs(contexts, continuations)
    for context, continuation, score in zip(contexts, continuations, found, strict=True):
        expected = model.logprobs([*context, *continuation])[-len(continuation) :]
        np.testing.assert_allclose(score.logprobs, expected, rtol=1e-4, atol=1e-4)
        assert score.token_ids == continuation


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(2, 60), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    st.integers(50, 200),
)
def test_every_pair_is_computed_once(pairs: list[tuple[int, int, int]], most: int) -> None:
    rows = [[kind] * context + [50 + n] * count for n, (kind, context, count) in enumerate(pairs)]
    lengths = [count for _, _, count in pairs]
    split = Split.of(rows, lengths, True, most)
    contexts = [context for found in split.branched.values() for context in found]
    numbers = [*split.alone, *(n for context in contexts for n in context.numbers)]
    assert sorted(numbers) == list(range(len(rows)))
    for branches, found in split.branched.items():
        for context in found:
            request = context.encoded(0, 1)
            assert len(request.prompt_ids) == context.computed <= most
            assert len(request.scored) == branches.total == request.branches.total  # type: ignore[union-attr]
            wanted = [t for n in context.numbers for t in rows[n][-lengths[n] :]]
            assert [token for token in request.scored if token != NOTHING] == wanted
    alone = sum(len(rows[n]) - split.prefix for n in split.alone) + split.prefix
    assert alone + sum(context.computed for context in contexts) <= sum(map(len, rows))


def test_a_beginning_is_shared_where_branches_are_not() -> None:
    rows = [[*range(40), n] for n in range(3)]
    assert Split.of(rows, [1] * 3, True, 0) == Split((0, 1, 2), 39, {})
    assert Split.of(rows, [1] * 3, False, 96) == Split((0, 1, 2), 0, {})


def test_greedy_continuations_are_known(llm: LLM, model: NumpyOpt) -> None:
    context = TEXT[:9]
    greedy = model.greedy(context, 5)
    other = [*greedy[:-1], (greedy[-1] + 1) % 96]
    found = llm.score_pairs([context] * 2, [greedy, other])
    assert [score.is_greedy for score in found] == [True, False]
    assert llm.score_pairs([], []) == []


def test_texts_are_encoded_together(llm: LLM) -> None:
    whole, context = llm.encode("the end of it"), llm.encode("the end")
    for left, right in (("the end", " of it"), ("the end ", "of it")):
        (score,) = llm.score_pairs([left], [right])
        assert score.token_ids == whole[len(context) :]


@pytest.mark.parametrize(
    ("contexts", "continuations", "said"),
    [
        ([[5]], [], "1 contexts, but 0"),
        ([[5]], [[]], "has 0 tokens"),
        ([[]], [[5]], "a context has no token"),
        ([[5]], [[5] * 97], "has 97 tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    llm: LLM, contexts: list[list[int]], continuations: list[list[int]], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        llm.score_pairs(contexts, continuations)


def test_the_command_says_the_perplexity(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It is a long text. " * 12)
    flags = ["--model", str(checkpoint()), "--dtype", "float32", "--batch-size", "2"]
    command = ["eval", "perplexity", "--file", str(text), "--stride", "40", *flags]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    with LLM(checkpoint(), dtype="float32", policy=Policy(batch_size=2)) as llm:
        expected = perplexity(llm, llm.encode(text.read_text()), None, 40)
    assert result.stdout == f"perplexity {expected.value:.4f} over {expected.tokens} tokens\n"
    result = CliRunner().invoke(main, [*command, "--window", "200"])
    assert result.exit_code == 2 and "from 2 to 97" in result.stderr
