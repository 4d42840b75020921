"""The task of a policy search, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Attention, Policy, Tier, Workload
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.search.costs import Costs
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.memory import peak_bytes
from flexgen_jax.units import scaled

DAY_S = 86_400


@dataclass(frozen=True)
class Choices:
    """Values that the search may choose from, in the order of preference."""

    weight_bits: tuple[int, ...] = (16,)
    cache_bits: tuple[int, ...] = (16,)
    attentions: tuple[Attention, ...] = ("host", "device")
    sparsities: tuple[float, ...] = (1.0,)
    kv_block_tokens: tuple[int, ...] = (32, 16, 8, 4)
    prefill_chunks: tuple[int, ...] = (2048, 512, 128)
    draft_tokens: tuple[int, ...] = (0,)

    @classmethod
    def keeping(cls, policy: Policy) -> Choices:
        """Returns choices that keep a policy's bits, sparsity and, unless it is "auto", attention.

        KV blocks may be smaller than the policy's, down to an eighth, since every sequence has an
        open one; where nothing fits, chunks of prompts may be, too. Fewer tokens may be guessed
        than the policy's, or none.
        """
        guesses = policy.draft_tokens
        block_tokens, chunk = policy.kv_block_tokens, policy.prefill_chunk
        return cls(
            weight_bits=(policy.weight_bits,),
            cache_bits=(policy.cache_bits,),
            attentions=cls.attentions if policy.attention == "auto" else (policy.attention,),
            sparsities=(policy.attention_sparsity,),
            kv_block_tokens=tuple(block_tokens >> n for n in range(4) if block_tokens >> n),
            prefill_chunks=tuple(chunk >> n for n in (0, 2, 4) if chunk >> n),
            draft_tokens=tuple(dict.fromkeys((0, -(-guesses // 2), guesses))),
        )


@dataclass(frozen=True)
class Plan:
    """A policy, and its predicted performance.

    block_sequences, num_sequences: sequences of one block, and of the workload; prefill_s,
    decode_s, total_s: seconds of all blocks of the workload; latency_s: seconds of one block;
    throughput: generated or scored tokens per second; peak_bytes: computed, by tier; busy_s:
    seconds by resource; moved_bytes: bytes by transfer; binding: the resource that is busy for the
    longest time in a block; written: bytes that are written to the disk, but for weights that are
    stored once.
    """

    policy: Policy
    block_sequences: int
    num_sequences: int
    prefill_s: float
    decode_s: float
    latency_s: float
    throughput: float
    peak_bytes: dict[Tier, int]
    busy_s: dict[str, float]
    moved_bytes: dict[str, int]
    binding: str
    written: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def written_a_day(self) -> float:
        """Bytes that are written to the disk in a day of such work."""
        return self.written / self.total_s * DAY_S


@dataclass(frozen=True)
class Problem:
    """The task of a search: model, machine, limits and workload.

    workload: its `num_sequences` may be 0, for the best number.
    base: a policy with everything that is not searched: schedule, overlap.
    max_latency: seconds that a block may take.
    min_throughput: token/s that are enough; the search then looks for the lowest latency.
    write_limit: bytes that may be written to the disk a day, which wears it.
    """

    setting: Setting
    hw: HardwareProfile
    budgets: Budgets
    workload: Workload
    base: Policy = field(default_factory=Policy)
    choices: Choices = field(default_factory=Choices)
    max_latency: float | None = None
    min_throughput: float | None = None
    write_limit: int | None = None

    def costs(self, policy: Policy) -> Costs:
        return Costs(self.setting, policy, self.hw)

    def of_block(self, policy: Policy) -> Workload:
        """Returns the workload of one block of the policy."""
        block = policy.batch_size * policy.num_batches
        count = min(block, self.workload.num_sequences or block)
        return self.workload.of(count)

    def plan(self, policy: Policy) -> BlockPlan:
        """Returns the plan of one block of the policy."""
        workload = self.workload if self.workload.num_sequences else self.of_block(policy)
        return BlockPlan(self.setting, policy, BlockShape.of(policy, workload))

    def peak(self, policy: Policy) -> dict[Tier, int]:
        return peak_bytes(self.plan(policy))

    def is_met(self, plan: Plan) -> bool:
        """Returns whether a plan keeps the limits of latency, throughput and writes."""
        is_soon = self.max_latency is None or plan.latency_s <= self.max_latency
        is_lean = self.excess_writes(plan) is None
        return is_soon and is_lean and plan.throughput >= (self.min_throughput or 0.0)

    def excess_writes(self, plan: Plan) -> str | None:
        """Returns a sentence for a plan that writes more than is allowed; None for any other."""
        if self.write_limit is None or plan.written_a_day <= self.write_limit:
            return None
        return (
            f"the plan writes {scaled(plan.written_a_day)}B a day to the disk, and "
            f"--write-limit allows {scaled(self.write_limit)}B; raise it, move the KV cache "
            "and the activations out of that tier, or use --cache-bits 4"
        )
