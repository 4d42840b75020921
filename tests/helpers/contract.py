"""The contract of a run: wherever its data lie and whatever it skips, its tokens are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, RequestOutput, SamplingParams
from flexgen_jax.engine import drafting
from flexgen_jax.engine.planner import Planner
from flexgen_jax.offload.speculation import Pace
from flexgen_jax.policy.policy import Attention
from flexgen_jax.policy.schedules import SCHEDULES
from tests.helpers.cases import covering_rows
from tests.helpers.drafts import Scripted
from tests.helpers.models import SPLITS, assert_within_plan

NEW_TOKENS = 9
MIXED_NEW_TOKENS = (2, 9, 1, 7)
SHARED = 22
"""Tokens that all prompts begin with."""

ROWS, BLOCK_TOKENS = 2, 8


@cache
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    shared, *rest = (rng.integers(3, 96, count).tolist() for count in (SHARED, 3, 10, 1, 6))
    return [[*shared, *end] for end in rest]


class Reference(Protocol):
    """A model in a folder, and an independent implementation of it."""

    @property
    def folder(self) -> Path: ...

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Returns the tokens that follow a prompt."""

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Returns the log-probability of every token but the first."""


LOSSES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bits": {"weight_bits": 4, "cache_bits": 4},
    "tokens": {"attention_sparsity": 0.3},
}
"""What a run does not compute with: all bits, or all earlier tokens."""


@dataclass(frozen=True)
class Case:
    """A way to run a model. prefix: "named" by the request, "found", or "none"."""

    weights: tuple[int, int] = (100, 0)
    cache: tuple[int, int] = (100, 0)
    activations: tuple[int, int] = (100, 0)
    schedule: str = "continuous"
    loads: str = "ahead"
    batches: int = 2
    unified: bool = True
    attention: Attention = "device"
    chunk: int = 2048
    prefix: str = "none"
    has_draft: bool = False
    has_mixed_lengths: bool = False
    host_experts: float = 0.0
    loses: str = "nothing"

    def __str__(self) -> str:
        """The fields that are not as in a resident run, for the name of a test."""
        return "-".join(
            f"{field.name}={getattr(self, field.name)}".replace(" ", "")
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )

    @property
    def resident(self) -> Case:
        """A run on the device alone that loses the same. A chunk and the text after a prefix attend
        to packed blocks, so these count where the cache is packed."""
        if self.loses == "bits":
            return Case(chunk=self.chunk, prefix=self.prefix, loses=self.loses)
        return Case(loses=self.loses)

    @property
    def policy(self) -> Policy:
        return Policy.from_percent(
            *(*self.weights, *self.cache, *self.activations),
            batch_size=ROWS,
            num_batches=self.batches,
            schedule=self.schedule,
            overlap=self.loads != "on demand",
            copies_ahead=self.loads == "ahead",
            attention=self.attention,
            prefill_chunk=self.chunk,
            kv_block_tokens=BLOCK_TOKENS,
            host_experts=self.host_experts,
            **LOSSES[self.loses],
        )

    @property
    def new_tokens(self) -> Sequence[int]:
        return MIXED_NEW_TOKENS if self.has_mixed_lengths else [NEW_TOKENS] * len(prompts())

    @property
    def computed_prompt_tokens(self) -> int:
        """Each shared part is computed once. The last token of a named prefix is not a part of it;
        sparse attention shares nothing."""
        shared = {"none": 0, "named": SHARED - 1, "found": SHARED}[self.prefix]
        return sum(map(len, prompts())) - (self.loses != "tokens") * (len(prompts()) - 1) * shared


PLACEMENT_AXES: dict[str, Sequence[Any]] = {
    "weights": SPLITS,
    "cache": SPLITS,
    "activations": SPLITS,
    "schedule": tuple(SCHEDULES),
    "loads": ("ahead", "read ahead", "on demand"),
    "batches": (1, 2),
    "unified": (True, False),
    "attention": ("device", "host"),
    "host_experts": (0.0, 0.5, 1.0),
}
LOSSLESS_AXES: dict[str, Sequence[Any]] = {
    **PLACEMENT_AXES,
    "chunk": (2048, 16),
    "prefix": ("none", "named", "found"),
    "has_draft": (False, True),
    "has_mixed_lengths": (False, True),
}
ALL_AXES = {**LOSSLESS_AXES, "loses": tuple(LOSSES)}


def is_allowed(row: Mapping[str, Any]) -> bool:
    """Guesses need attention on the device to all tokens. Those of a pass attend to each other
    before they are packed, which changes the tokens of packed caches."""
    is_lossy = row.get("loses", "nothing") != "nothing"
    return not row.get("has_draft") or not (is_lossy or row.get("attention") == "host")


def is_quick(row: Mapping[str, Any]) -> bool:
    """A lossy run that also has chunks or a prefix compiles many programs."""
    is_lossy = row.get("loses", "nothing") != "nothing"
    is_whole = row.get("chunk", 2048) == 2048 and row.get("prefix", "none") == "none"
    return is_allowed(row) and (is_whole or not is_lossy)


def cases(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Case]:
    """A covering array of strength two."""
    return [Case(**row) for row in covering_rows(axes, is_allowed, seed)]


def cases_with(
    name: str, values: Sequence[str], axes: Mapping[str, Sequence[Any]], seed: int = 0
) -> list[Any]:
    """A covering array of strength two of one more axis and the fields of `Case`, for
    `parametrize`. Other seeds than 0 are slow."""
    rows = covering_rows({name: values, **axes}, is_quick if seed == 0 else is_allowed, seed)
    found = []
    for row in sorted(rows, key=lambda row: values.index(row[name])):
        value, case = row.pop(name), Case(**row)
        marks = [pytest.mark.slow] * bool(seed)
        found.append(pytest.param(value, case, id=f"{value}-{seed}-{case}", marks=marks))
    return found


class Contract:
    """Runs a model in many ways. Lossy cases are compared with a resident run that loses the
    same, all others with the reference. has_logprobs: log-probabilities, too. adapters: of the
    model; chosen: that of each prompt, () if none is chosen."""

    def __init__(
        self,
        reference: Reference,
        has_logprobs: bool = False,
        adapters: Sequence[str] = (),
        chosen: Sequence[str | None] = (),
    ) -> None:
        self._reference, self._has_logprobs = reference, has_logprobs
        self._adapters, self._chosen = adapters, chosen
        self._resident: dict[Case, list[list[int]]] = {}

    def check(self, case: Case, offload_dir: Path, patch: pytest.MonkeyPatch) -> None:
        expected = self._expected(case, offload_dir / "resident", patch)
        texts = [[*ids, *made] for ids, made in zip(prompts(), expected, strict=True)]
        found = self._run(case, offload_dir, patch, texts)
        for result, ids, count in zip(found, expected, case.new_tokens, strict=True):
            assert result.token_ids == ids[:count]
        if case.loses == "nothing" and self._has_logprobs:
            self._check_logprobs(found)
        assert not [*offload_dir.glob("runs/*/*")]

    def _check_logprobs(self, results: Sequence[RequestOutput]) -> None:
        """They are the logits minus one constant for each token."""
        for ids, result in zip(prompts(), results, strict=True):
            expected = self._reference.logprobs([*ids, *result.token_ids])[len(ids) - 1 :]
            found = [token.logprob for token in result.logprobs or ()]
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)

    def _expected(self, case: Case, folder: Path, patch: pytest.MonkeyPatch) -> list[list[int]]:
        resident = case.resident
        if resident not in self._resident:
            self._resident[resident] = (
                [self._reference.greedy(ids, NEW_TOKENS) for ids in prompts()]
                if case.loses == "nothing"
                else [result.token_ids for result in self._run(resident, folder, patch, ())]
            )
        return self._resident[resident]

    def _run(
        self,
        case: Case,
        offload_dir: Path,
        patch: pytest.MonkeyPatch,
        texts: Sequence[Sequence[int]],
    ) -> list[RequestOutput]:
        """Returns every prompt's result; texts: what is guessed, with every fifth token wrong."""
        patch.setattr(Planner, "is_worth_sharing", lambda self, saved, requests: True)
        patch.setattr(drafting, "LookupDrafter", lambda: Scripted(texts, wrong=5))
        patch.setattr(drafting, "cache_folder", lambda name: offload_dir / name)
        patch.setattr(Pace, "count", lambda pace: pace.most)
        with LLM(
            self._reference.folder,
            dtype="float32",
            policy=case.policy,
            offload_dir=offload_dir,
            unified=case.unified,
            prefix_sharing=case.prefix == "found",
            draft="lookup" if case.has_draft else None,
            adapter=self._adapters,
        ) as llm:
            results = llm.generate(
                prompt_token_ids=prompts(),
                sampling_params=[
                    SamplingParams(
                        max_tokens=count,
                        logprobs=0 if self._has_logprobs else None,
                        ignore_eos=True,
                    )
                    for count in case.new_tokens
                ],
                prefix=prompts()[0][:SHARED] if case.prefix == "named" else None,
                adapter=self._chosen or None,
            )
            report = llm.report()
        assert_within_plan(report)
        shares = Case() if self._chosen else case  # texts with adapters share nothing
        assert report["prompt_tokens"] == shares.computed_prompt_tokens, report["prompt_tokens"]
        if case.has_draft:
            assert report["tokens_a_pass"] > 1
        return results
