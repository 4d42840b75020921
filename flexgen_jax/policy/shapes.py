"""Shapes of batches, and what all plans of a model on a machine share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.policy.drafts import DraftRates
from flexgen_jax.policy.expert_rates import ExpertRates
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.policy import GREEDY, HeadUse, Policy, Workload


@dataclass(frozen=True)
class Setting:
    """A model and a machine, to make policies for."""

    config: ModelConfig
    # The compute dtype, and the meaning of 16 bits.
    dtype: str
    # Whether host and device are one RAM, so that nothing is copied between them.
    unified: bool
    # How much work the kernels that will compute take at once.
    sizes: KernelSizes = field(default_factory=KernelSizes)
    # Of the drafter, if a policy has one.
    drafts: DraftRates = field(default_factory=DraftRates)
    # How often experts are chosen.
    experts: ExpertRates = field(default_factory=ExpertRates)


@dataclass(frozen=True)
class BatchShape:
    """One batch: its rows, its padded prompt length, and the most tokens that a row generates.

    scores_prompt: whether the head needs all tokens of the prompts, to score or to pool them.
    """

    rows: int
    prompt_len: int
    gen_len: int
    scores_prompt: bool = False


@dataclass(frozen=True)
class BlockShape:
    """Batches that enter together: rows and padded prompt length of each, and tokens to generate.

    scored: the batches whose prompts the head scores; None for all, if it scores one token, as in
    `Workload.scores_prompts`. prefix: the number of tokens before the prompts, which several of
    them share; prefixes: how many different ones are there together.
    """

    batch_sizes: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    gen_len: int
    head: HeadUse = GREEDY
    scored: tuple[int, ...] | None = None
    prefix: int = 0
    prefixes: int = 1

    @property
    def batches(self) -> tuple[BatchShape, ...]:
        """The batches, one by one, without the prefix."""
        pairs = zip(self.batch_sizes, self.prompt_lens, strict=True)
        return tuple(
            BatchShape(rows, tokens, self.gen_len, self._scores_prompt(batch))
            for batch, (rows, tokens) in enumerate(pairs)
        )

    @property
    def prefix_batches(self) -> tuple[BatchShape, ...]:
        """The prefixes, each as a batch of one row."""
        return (BatchShape(1, self.prefix, gen_len=1),) * (self.prefixes if self.prefix else 0)

    def with_last(self, rows: int) -> BlockShape:
        """Returns the batches with the last `rows` rows as a batch of their own."""
        *others, last = self.batch_sizes
        scored = self.scored
        if scored is not None and len(others) in scored:
            scored = (*scored, len(others) + 1)
        return replace(
            self,
            batch_sizes=(*others, last - rows, rows),
            prompt_lens=(*self.prompt_lens, self.prompt_lens[-1]),
            scored=scored,
        )

    def _scores_prompt(self, batch: int) -> bool:
        if self.scored is None:
            return self.head.reads_prompts(self.gen_len)
        return batch in self.scored

    @classmethod
    def of(cls, policy: Policy, workload: Workload) -> BlockShape:
        """Returns the largest block that the policy makes of a workload of equal prompts."""
        batches = min(policy.num_batches, -(-workload.num_sequences // policy.batch_size))
        rows = min(policy.batch_size, -(-workload.num_sequences // batches))
        together = -(-rows * batches // workload.sharing_sequences)
        return cls(
            batch_sizes=(rows,) * batches,
            prompt_lens=(workload.prompt_len,) * batches,
            gen_len=workload.gen_len,
            head=workload.head,
            prefix=workload.prefix_len,
            # Further tokens, for sequences that enter while others finish.
            prefixes=min(workload.num_prefixes, together + workload.prefix_depth),
        )


class Span(NamedTuple):
    """The tokens of a step: first index in the batch's padded sequences, and number of tokens."""

    start: int
    tokens: int
