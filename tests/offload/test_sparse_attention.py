"""Tests top-K sparse attention against NumPy: on the device, on the host, split, and in whole
runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.cpu.host_attention import Candidates, HostAttention, HostBlock
from flexgen_jax.cpu.jit.top_tokens import choose_kernel
from flexgen_jax.layers.attention import attend_blocks, attend_itself, merge
from flexgen_jax.layers.sparse_attention import attend_ranked, attend_top, rank
from flexgen_jax.models.parts import AttentionSpec
from tests.helpers.attention import FORMATS, kept
from tests.helpers.cases import covering, examples
from tests.helpers.models import BASE, SHORT, prompts, random_tensors, run_greedy, write_checkpoint
from tests.helpers.numpy_opt import NumpyOpt

BATCH, HEADS = 3, 2
SPEC = AttentionSpec(HEADS, HEADS, 1)

# Compiled as one program, as in a run.
everywhere = jax.jit(attend_top, static_argnames="max_tokens")
ranked_by = jax.jit(rank, static_argnames="max_tokens")
to_ranked = jax.jit(attend_ranked)


def numpy_top(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, valid: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Returns sparse attention in fp64: softmax(query key^T) value, with the weights of some tokens
    set to 0.

    In each head, the last token, which is new, and the counts[batch] earlier tokens with the
    highest scores keep their weights; of equal scores the first are kept. valid: bool [batch,
    token]; returns [batch, head, 1, head_dim].
    """
    scores = np.einsum("bhqd,bhtd->bht", query.astype(np.float64), key)
    scores = np.where(valid[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for b, h in np.ndindex(scores.shape[:2]):
        order = np.argsort(-scores[b, h, :-1], kind="stable")
        weights[b, h, order[counts[b] :]] = 0
    return np.einsum("bht,bhtd->bhd", weights, value)[:, :, None]


class Case:
    """A KV cache in blocks of given lengths, the last of which is open, and a new token."""

    def __init__(
        self,
        seed: int,
        lengths: tuple[int, ...],
        first: list[int],
        position: int,
        values: str,
        dtype: str = "float32",
        bits: int = 16,
        head_dim: int = 8,
    ) -> None:
        """Draws the numbers; values: "normal"; "whole", whole numbers, many of them equal; or
        "equal"."""
        rng = np.random.default_rng(seed)

        def draw(tokens: int) -> np.ndarray:
            shape = (BATCH, HEADS, tokens, head_dim)
            if values == "equal":
                return np.full(shape, 0.5, np.float32)
            x = rng.normal(size=shape).astype(np.float32)
            return np.round(x) if values == "whole" else x

        self.query = draw(1)
        new = [kept(rng.normal(size=self.query.shape), dtype, 16) for _ in range(2)]
        self.new = (new[0][0], new[1][0])
        self.starts = [0, *itertools.accumulate(lengths)][:-1]
        self.position, self.first = position, np.array(first, np.int32)
        self.blocks, sides = [], ([], [])
        for index, length in enumerate(lengths):
            width = 16 if index == len(lengths) - 1 else bits  # the open block is not quantized
            pair = [
                kept(x, dtype, width) for x in (draw(length), rng.normal(size=draw(length).shape))
            ]
            self.blocks.append((pair[0][0], pair[1][0]))
            for side, (_, stands_for) in zip(sides, pair, strict=True):
                side.append(stands_for)
        at = np.arange(sum(lengths))
        valid = (at[None] >= self.first[:, None]) & (at[None] < position)
        self.valid = np.concatenate([valid, np.ones((BATCH, 1), bool)], axis=1)
        self.key, self.value = (
            np.concatenate([*side, whole], axis=2)
            for side, (_, whole) in zip(sides, new, strict=True)
        )
        self.lengths = lengths

    def counts(self, fraction: float) -> np.ndarray:
        policy = Policy(attention_sparsity=fraction)
        return np.array([policy.attended(self.position - f) for f in self.first], np.int32)

    def expected(self, counts: np.ndarray) -> np.ndarray:
        return numpy_top(self.query, self.key, self.value, self.valid, counts)

    def on_device(self, counts: np.ndarray) -> Any:
        most = max(1, int(counts.max()))
        where = (np.array(self.starts, np.int32), self.position, self.first)
        found = everywhere(
            jnp.asarray(self.query), tuple(self.blocks), *where, counts, max_tokens=most
        )
        return merge([attend_itself(self.query, *self.new), found])[0]

    def rank(self, chosen: list[int], most: int) -> tuple[Any, Candidates]:
        """Ranks the tokens of the chosen blocks; returns them as ranked, and with their indices in
        the sequence."""
        keys = tuple(self.blocks[i][0] for i in chosen)
        starts = np.array([self.starts[i] for i in chosen], np.int32)
        where = (starts, self.position, self.first)
        found = ranked_by(jnp.asarray(self.query), keys, *where, max_tokens=most)
        at = np.concatenate([self.starts[i] + np.arange(self.lengths[i]) for i in chosen])
        scores, tokens, lse = (np.asarray(x) for x in found)
        return found, Candidates(scores, at.astype(np.int32)[tokens], lse)

    def split(
        self, host: HostAttention, counts: np.ndarray, here: list[int], keys_move: bool
    ) -> np.ndarray:
        """Attends with the blocks `here` on the device and the others on the host, whose keys are
        moved or not."""
        most = max(1, int(counts.max()))
        away = [i for i in range(len(self.blocks)) if i not in here]
        ranked, candidates = self.rank(here, most) if here else (None, None)
        moved = self.rank(away, most)[1] if keys_move else None
        blocks = [HostBlock(self.starts[i], self.blocks[i]) for i in away]
        args = (self.query, blocks, self.position, self.first, SPEC, counts, candidates, moved)
        there, left = host.attend_top(*args)
        partials = [attend_itself(self.query, *self.new), there]
        if here:
            values = tuple(self.blocks[i][1] for i in here)
            partials.append(to_ranked(values, ranked, left))
        else:
            assert not left.any()
        return np.asarray(merge(partials)[0])


FRACTIONS = [0.01, 0.1, 0.3, 0.5, 0.99, 1.0]


@examples(8)
@given(
    seed=st.integers(0, 1 << 16),
    lengths=st.sampled_from([(1,), (6,), (5, 4), (4, 3, 2, 3, 2, 3)]),
    first=st.lists(st.floats(0, 1), min_size=BATCH, max_size=BATCH),
    filled=st.floats(0, 1),
    values=st.sampled_from(["normal", "whole", "equal"]),
    fraction=st.sampled_from(FRACTIONS),
    here=st.sets(st.integers(0, 5)),
    keys_move=st.booleans(),
)
def test_chosen_tokens_are_numpys(
    host: HostAttention,
    seed: int,
    lengths: tuple[int, ...],
    first: list[float],
    filled: float,
    values: str,
    fraction: float,
    here: set[int],
    keys_move: bool,
) -> None:
    """There are masks, one token, all tokens masked but one, and equal scores; in one place and
    split."""
    before = sum(lengths[:-1])
    position = before + round(filled * lengths[-1])
    case = Case(seed, lengths, [round(f * position) for f in first], position, values)
    counts = case.counts(fraction)
    expected = case.expected(counts)
    found = case.on_device(counts)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    on_device = [i for i in sorted(here) if i < len(lengths) - 1]
    found = case.split(host, counts, on_device, keys_move)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "head_dim"), covering(FORMATS, [8, 64, 80], together=1))
def test_formats(host: HostAttention, kind: tuple[str, int], head_dim: int) -> None:
    dtype, bits = kind
    case = Case(head_dim, (9, 7, 8), [0, 3, 20], 22, "normal", dtype, bits, head_dim)
    case.query *= head_dim**-0.5
    counts = case.counts(0.3)
    expected = case.expected(counts)
    # The device rounds what it unpacks to the dtype; the host does not.
    is_rounded = bits < 16 and dtype != "float32"
    rounded = {"rtol": 1e-2, "atol": 1e-2} if is_rounded else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(case.on_device(counts), expected, **rounded)
    for here, keys_move in (([], False), ([1], False), ([0, 1], True)):
        found = case.split(host, counts, here, keys_move)
        tolerance: Any = rounded if here or keys_move else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(found, expected, **tolerance)


def test_all_tokens_are_dense_attention() -> None:
    """With all tokens the policy is dense; and ranking all of them gives the result of dense
    attention."""
    assert not Policy(attention_sparsity=1.0).is_sparse
    case = Case(0, (9, 7, 8), [0, 3, 21], 22, "normal")
    where = (np.array(case.starts, np.int32), case.position, case.first)
    blocks = attend_blocks(case.query, tuple(case.blocks), *where)
    dense, _ = merge([attend_itself(case.query, *case.new), blocks])
    found = case.on_device(case.counts(1.0))
    np.testing.assert_allclose(found, dense, rtol=1e-5, atol=1e-6)


@examples(40)
@given(st.integers(0, 1 << 16), st.integers(1, 70), st.floats(0, 1), st.booleans())
def test_choose_top(seed: int, tokens: int, share: float, is_whole: bool) -> None:
    rng = np.random.default_rng(seed)
    scores = (rng.normal(size=(5, tokens)) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
    scores = np.round(scores) if is_whole else scores
    scores[:, : tokens // 4] = -np.inf
    counts = np.full(5, round(share * (tokens - tokens // 4)), np.int32)
    chosen = np.full((5, tokens + 1), -1, np.int32)
    choose_kernel().bind(scores, tokens, counts, chosen, tokens + 1)(0, 5)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : counts[0]]
    np.testing.assert_array_equal(chosen[:, : counts[0]], np.sort(best, axis=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_shows(host: HostAttention, wrong: float, dtype: str) -> None:
    """It shows in the result, so that the run ends with an error; other heads are unchanged."""
    case = Case(0, (9, 7, 8), [0, 3, 0], 22, "normal", dtype)
    key, value = case.blocks[1]
    case.blocks[1] = (key.at[1, 0, 5].set(wrong), value)
    blocks = [HostBlock(s, b) for s, b in zip(case.starts, case.blocks, strict=True)]
    where = (case.query, blocks, case.position, case.first, SPEC)
    dense, _ = host.attend(*where)
    (sparse, lse), _ = host.attend_top(*where, case.counts(0.3), None, None)
    for out in (dense, sparse + lse[..., None]):
        is_finite = np.isfinite(out).all((2, 3))
        assert not is_finite[1, 0]
        assert is_finite.sum() == BATCH * HEADS - 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("place", "fraction"), covering(["here", "host", "device"], [0.1, 0.4], together=1)
)
def test_scores_are_numpys(tmp_path: Path, place: str, fraction: float) -> None:
    """Scores the whole model, token by token, against plain NumPy's sparse attention."""
    folder = write_checkpoint(tmp_path / "m")
    model = NumpyOpt(BASE, random_tensors(BASE), fraction)
    ids = [prompts()[i] for i in (1, 3, 6)]
    cache = 100 if place == "here" else 40
    attention: Any = "auto" if place == "here" else place
    policy = Policy.from_percent(
        *(100, 0, cache, 100 - cache, 100, 0), kv_block_tokens=4, attention=attention
    )
    options = {"policy": policy, "attention_sparsity": fraction, "unified": False}
    with LLM(folder, dtype="float32", **options) as llm:
        found = llm.score(prompt_token_ids=ids, through_cache=True)
    for row, score in zip(ids, found, strict=True):
        np.testing.assert_allclose(score.logprobs, model.logprobs(row), rtol=1e-3, atol=1e-4)


def test_sparsity_changes_something(checkpoint: Callable[[str], Path]) -> None:
    dense = run_greedy(checkpoint(), SHORT, Policy(batch_size=2))
    sparse = run_greedy(checkpoint(), SHORT, Policy(batch_size=2, attention_sparsity=0.05))
    assert dense != sparse


@pytest.mark.parametrize("attention", ["host", "device"])
def test_values_hardly_move(tmp_path: Path, attention: Any) -> None:
    """At a fraction of 0.1, at most 0.12 of the values' bytes move, both directions together."""
    folder = write_checkpoint(tmp_path / "m", max_position_embeddings=1100)

    def step(fraction: float, attention: Any) -> int:
        """Returns the bytes that one decode step moves."""
        policy = Policy.from_percent(
            *(100, 0, 0, 100, 100, 0),
            batch_size=2,
            attention=attention,
            attention_sparsity=fraction,
        )
        with LLM(folder, dtype="float32", policy=policy, unified=False) as llm:
            llm.generate(
                prompt_token_ids=[[5] * 1024, [6] * 1024],
                sampling_params=SamplingParams(max_tokens=2, ignore_eos=True),
            )
            return sum(llm.report()["decode_bytes"].values())

    values = keys = 3 * 2 * 1024 * 32 * 4  # layers, sequences, tokens, hidden size, bytes
    assert step(1.0, "device") > values + keys
    found = step(0.1, attention) - (keys if attention == "device" else 0)
    assert found <= 0.12 * values
