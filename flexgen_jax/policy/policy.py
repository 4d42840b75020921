"""A policy: where weights, KV cache and activations live, and how a block is walked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from typing import Any, Literal, get_args

from flexgen_jax.errors import UserError
from flexgen_jax.models.formats.known import WEIGHT_FORMATS, WeightFormat
from flexgen_jax.models.formats.storage import BITS, MATMUL_BITS
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.schedules import SCHEDULES, Schedule

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
Attention = Literal["auto", "device", "host"]
ATTENTIONS: tuple[Attention, ...] = get_args(Attention)

MAX_DRAFT = 16
"""The most tokens that may be guessed for a pass."""

PROMPT_BLOCK_FACTOR = 4
"""Length of a prompt's KV blocks relative to those of generated tokens."""


@dataclass(frozen=True)
class HeadUse:
    """What becomes of the logits.

    logit_copies: how many copies of the logits are in memory together: sampling sorts them, scoring
        normalises them.
    """

    name: str
    logit_copies: int

    def reads_prompts(self, gen_len: int) -> bool:
        """Whether the head needs all tokens of the prompts, with `gen_len` tokens to generate."""
        return self == SAMPLE_AND_READ or (self == SCORE and gen_len == 1)


GREEDY, SAMPLE, SCORE = HeadUse("greedy", 1), HeadUse("sample", 8), HeadUse("score", 3)
SAMPLE_AND_READ = HeadUse("sample, and read prompts", 9)
"""Besides choosing tokens, the head scores or pools all tokens of the prompts."""


class PolicyError(UserError):
    """An impossible policy; the message names the field and the way out."""


@dataclass(frozen=True)
class Placement:
    """Fractions of some bytes on the device and on the host; the rest is on disk."""

    device: float = 1.0
    host: float = 0.0

    def __post_init__(self) -> None:
        for name in ("device", "host"):
            value = getattr(self, name)
            if not isinstance(value, int | float):
                raise PolicyError(f"{name} must be a number from 0 to 1, not {value!r}")
            if not 0 <= value <= 1:
                raise PolicyError(f"{name} must be between 0 and 100 %, not {100 * value:g} %")
        if self.device + self.host > 1 + 1e-9:
            raise PolicyError(
                f"device {100 * self.device:g} % and host {100 * self.host:g} % are together more "
                "than 100 %; what they leave goes to disk"
            )

    @property
    def disk(self) -> float:
        left = 1.0 - self.device - self.host
        return left if left > 1e-9 else 0.0

    def fraction(self, tier: Tier) -> float:
        return float(getattr(self, tier))


@dataclass(frozen=True)
class Workload:
    """The sequences of a run: prompts of at most `prompt_len` tokens, continued by `gen_len`
    tokens, or scored.

    mean_prompt_len: the mean length of prompts of mixed lengths, or None if all are equally long.
    The mean length decides the time, the longest prompt the memory. prefix_len: tokens before the
    prompts, which several of them share and which are computed once; num_prefixes: number of
    different prefixes, each shared by an equal number of prompts; prefix_depth: how many of them a
    prompt begins with at most, one going on from another.
    """

    prompt_len: int
    gen_len: int
    num_sequences: int = 1
    head: HeadUse = GREEDY
    mean_prompt_len: int | None = None
    prefix_len: int = 0
    num_prefixes: int = 1
    prefix_depth: int = 1

    def covering(self, other: Workload) -> Workload:
        """Returns this workload with room for another workload's sequences."""
        is_longer = other.prompt_len > self.prompt_len
        return replace(
            self,
            prompt_len=max(self.prompt_len, other.prompt_len),
            mean_prompt_len=self.mean_prompt_len or (self.prompt_len if is_longer else None),
            gen_len=max(self.gen_len, other.gen_len),
            head=max(self.head, other.head, key=lambda head: head.logit_copies),
        )

    def of(self, count: int) -> Workload:
        """Returns `count` of the sequences."""
        prefixes = -(-count // max(1, self.sharing_sequences)) if self.num_sequences else 1
        return replace(self, num_sequences=count, num_prefixes=prefixes)

    @property
    def sharing_sequences(self) -> int:
        """The most sequences that share a prefix; all where there is none."""
        return -(-self.num_sequences // self.num_prefixes)

    @property
    def tokens_each(self) -> int:
        """Tokens of each sequence that count for the throughput: the new or the scored ones."""
        return self.prompt_len if self.head == SCORE and self.gen_len == 1 else self.gen_len

    @property
    def scores_prompts(self) -> bool:
        """Whether the head needs all tokens of the prompts."""
        return self.head.reads_prompts(self.gen_len)

    @property
    def typical(self) -> Workload:
        """This workload with all prompts of the mean length."""
        length = self.mean_prompt_len or self.prompt_len
        return replace(self, prompt_len=length, mean_prompt_len=None)


@dataclass(frozen=True)
class Policy:
    """Placement of everything, batch shape and schedule (FlexGen, section 4.2).

    A block is `num_batches` batches of `batch_size` sequences, the most that are there together; a
    layer's weights serve all batches. `schedule` says when others enter: "continuous" as soon as
    rows are free, "diagonal" one batch a wave, "zigzag" when all have left, "row" one by one.
    Without `overlap`, nothing is loaded ahead of its use; without `copies_ahead`, a layer's weights
    are read ahead, but copied to the device only after the previous layer, so that the device holds
    one layer: layers with hundreds of experts are that large.

    A prompt of more than `prefill_chunk` tokens is prefilled in chunks of that size, one per wave.

    Generated tokens are cached in KV blocks of `kv_block_tokens`, which are immutable once full.
    Hidden states of single tokens stay on the device while a batch's are small, and never go to
    disk, wherever those of prompts are.

    Weights and full KV blocks are kept in `weight_bits` and `cache_bits` per element (section 5);
    16 stands for the dtype. Weights have groups along a kernel's input, or with `weight_format`
    "paper" those of section 5, along its output. With `matmul_bits` 8, decoder layers multiply
    8-bit integers. Weights and hidden states are rounded, except the largest hidden states
    (LLM.int8(), section 3); on a CPU only where there are more than a few rows.

    `attention` says where decoding attends to KV blocks that are not on the device: on the
    "device", after moving them there, or on the "host", in place. "auto" leaves that to a search;
    without one it is the host, or the device if `LLM` finds that both are one memory and attention
    is not sparse.

    `host_experts` is the fraction of a layer's chosen experts, of those that are not on the device,
    that the CPU computes where they lie while the others are copied to the device; only where few
    experts are chosen, as for few sequences. None leaves it to a search; without one it is 0. Where
    host and device are one, it has no effect. `expert_cache_bytes` is device memory for copied
    experts, besides those whose home the device is: the last used ones of all layers stay there.

    With `attention_sparsity` below 1, each head of a decoding token attends to itself and to this
    fraction of the tokens before it, those with the highest scores (section 5). The values of
    blocks that are not on the device are then never moved to it.

    With `draft_tokens`, each pass also verifies that number of draft tokens per sequence, and keeps
    the tokens that the model itself would have chosen (Leviathan, Kalman and Matias 2023, "Fast
    Inference from Transformers via Speculative Decoding"). The sequences of a batch stay within a
    pass of each other: the row with the fewest accepted drafts slows the others.
    """

    weights: Placement = Placement()
    cache: Placement = Placement()
    activations: Placement = Placement()
    batch_size: int = 8
    num_batches: int = 1
    schedule: str = "continuous"
    overlap: bool = True
    copies_ahead: bool = True
    kv_block_tokens: int = 32
    prefill_chunk: int = 2048
    attention: Attention = "auto"
    weight_bits: int = 16
    cache_bits: int = 16
    matmul_bits: int = 16
    attention_sparsity: float = 1.0
    weight_format: WeightFormat = "own"
    draft_tokens: int = 0
    host_experts: float | None = None
    expert_cache_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_batches", "kv_block_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PolicyError(f"{name} must be a positive integer, not {value!r}")
        choices: dict[str, tuple[object, ...]] = {
            "weight_bits": BITS,
            "cache_bits": BITS,
            "matmul_bits": MATMUL_BITS,
            "schedule": tuple(SCHEDULES),
            "attention": ATTENTIONS,
            "weight_format": WEIGHT_FORMATS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise PolicyError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")
        fraction = self.attention_sparsity
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise PolicyError(f"attention_sparsity must be a number, not {fraction!r}")
        if not 0 < fraction <= 1:
            raise PolicyError(
                "attention_sparsity is the fraction of tokens attended to, more than 0 and at "
                f"most 1 (all), not {fraction:g}"
            )
        self._check_experts()
        self._check_drafts()

    def _check_experts(self) -> None:
        nbytes = self.expert_cache_bytes
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
            raise PolicyError(f"expert_cache_bytes must be an integer from 0, not {nbytes!r}")
        share = self.host_experts
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
            raise PolicyError(f"host_experts must be a number from 0 to 1, not {share!r}")
        if share is not None and not 0 <= share <= 1:
            raise PolicyError(
                "host_experts is the fraction of the chosen experts that the CPU computes, from 0 "
                f"to 1, not {share:g}"
            )

    def _check_drafts(self) -> None:
        count = self.draft_tokens
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_DRAFT:
            raise PolicyError(f"draft_tokens must be from 0 to {MAX_DRAFT}, not {count!r}")
        if not count:
            return
        if self.is_sparse:
            raise PolicyError("draft_tokens cannot be combined with attention_sparsity below 1")
        if self.attention == "host":
            raise PolicyError(
                "draft_tokens needs attention on the device, because the host "
                "attends to one token at a time"
            )

    @classmethod
    def from_percent(
        cls,
        weights_device: float,
        weights_host: float,
        cache_device: float,
        cache_host: float,
        activations_device: float,
        activations_host: float,
        **options: Any,
    ) -> Policy:
        """Builds a policy from FlexGen's six numbers, in percent; the rest of each pair's 100 goes
        to disk."""

        def place(name: str, device: float, host: float) -> Placement:
            try:
                return Placement(device / 100, host / 100)
            except PolicyError as error:
                raise PolicyError(f"{name}: {error}") from None

        return cls(
            weights=place("weights", weights_device, weights_host),
            cache=place("cache", cache_device, cache_host),
            activations=place("activations", activations_device, activations_host),
            **options,
        )

    @property
    def order(self) -> Schedule:
        """The order of the steps, by the name in `schedule`."""
        return SCHEDULES[self.schedule]

    def formats(self, dtype: str) -> Formats:
        return Formats(
            dtype=dtype,
            weight_bits=self.weight_bits,
            cache_bits=self.cache_bits,
            matmul_bits=self.matmul_bits,
            weight_format=self.weight_format,
        )

    @property
    def pass_tokens(self) -> int:
        """The tokens of a sequence that a pass after the prompt computes: the guesses, and those
        that the last pass found, one more than it accepted, which are only now cached."""
        return 2 * self.draft_tokens + 1

    @property
    def attends_on_host(self) -> bool:
        """Whether blocks of the host and disk tiers are attended to where they are."""
        return self.attention != "device" and not self.draft_tokens

    @property
    def values_stay(self) -> bool:
        """Whether decoding leaves the values of host and disk tiers' blocks where they are."""
        return self.attends_on_host or self.is_sparse

    @property
    def moved_share(self) -> float:
        """Share of the bytes of keys and values outside of the device that moves there per
        token."""
        return (not self.values_stay) / 2 + (not self.attends_on_host) / 2

    def unpacks(self, sizes: KernelSizes, batches: int) -> bool:
        """Returns whether a layer's weights are unpacked as a whole, for this many batches."""
        is_packed = self.weight_bits < 16 and self.matmul_bits == 16
        return sizes.unpacks_layers and is_packed and self.order.shares_weights and batches > 1

    @property
    def uses_disk(self) -> bool:
        return any(placement.disk > 0 for placement in (self.weights, self.cache, self.activations))

    @property
    def is_sparse(self) -> bool:
        return self.attention_sparsity < 1

    def attended(self, tokens: int) -> int:
        """Returns the number of the `tokens` earlier tokens that a head attends to.

        It is at least one if there are any.
        """
        # The difference undoes a rounding error just above a whole number, which is no token more.
        return max(min(tokens, 1), ceil(self.attention_sparsity * tokens - 1e-9))

    @property
    def percent(self) -> tuple[float, ...]:
        """The six percentages that `from_percent` takes."""
        placements = (self.weights, self.cache, self.activations)
        return tuple(
            round(100 * x, 4)
            for placement in placements
            for x in (placement.device, placement.host)
        )

    @property
    def in_words(self) -> str:
        """The placement in words: "weights 20 % device + 80 % host, KV cache 100 % host, ..."."""
        placed = [("weights", self.weights), ("KV cache", self.cache)]
        placed.append(("hidden states", self.activations))
        texts = []
        for name, placement in placed:
            shares = [(tier, 100 * placement.fraction(tier)) for tier in TIERS]
            shown = " + ".join(f"{share:.3g} % {tier}" for tier, share in shares if share > 0.05)
            texts.append(f"{name} {shown}")
        return ", ".join(texts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Reads what `to_json` or `flexgen-jax plan --json` wrote; raises `PolicyError` on anything
        else."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise PolicyError(f"not JSON: {error}") from None
        if not isinstance(raw, Mapping):
            raise PolicyError("a policy must be a JSON object")
        if isinstance(raw.get("policy"), Mapping):
            raw = raw["policy"]
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(raw) - names)
        if unknown:
            raise PolicyError(f"unknown field {unknown[0]!r}; known fields: {sorted(names)}")
        try:
            placements = {
                name: Placement(**raw[name])
                for name in ("weights", "cache", "activations")
                if name in raw
            }
        except TypeError:
            raise PolicyError('a placement is {"device": 0.2, "host": 0.8}') from None
        return cls(**{**raw, **placements})


@dataclass(frozen=True)
class Ahead:
    """How far loads run ahead of their use: weights in layers, the rest in steps.

    A disk read starts earlier than the copy from host to device, which follows it.
    """

    weight_reads: int = 2
    weight_copies: int = 1
    cache_reads: int = 3
    cache_copies: int = 1
    hidden_reads: int = 2

    @property
    def cache_buffers(self) -> int:
        """Number of sets of buffers for KV blocks from disk: layers being read ahead, and the layer
        being computed."""
        return self.cache_reads + 1

    @classmethod
    def of(cls, policy: Policy) -> Ahead:
        if not policy.overlap:
            return cls(0, 0, 0, 0, 0)
        return cls() if policy.copies_ahead else cls(weight_copies=0)


def cut(tokens: int, size: int) -> tuple[int, ...]:
    """Cuts `tokens` into pieces of `size`; the last block is shorter if the division has a
    remainder."""
    whole, remainder = divmod(tokens, size)
    return (size,) * whole + ((remainder,) if remainder else ())


def prompt_chunks(prompt_len: int, prefill_chunk: int) -> tuple[int, ...]:
    """Returns the token counts of a prompt's prefill chunks; the first chunk is shorter if the
    division has a remainder."""
    return cut(prompt_len, prefill_chunk)[::-1]


def prompt_blocks(prompt_len: int, kv_block_tokens: int) -> tuple[int, ...]:
    """Returns the token counts of the KV blocks of a prompt that is prefilled as a whole."""
    return cut(prompt_len, PROMPT_BLOCK_FACTOR * kv_block_tokens)


def growing_blocks(gen_len: int, kv_block_tokens: int) -> tuple[int, ...]:
    """Returns the token counts of the KV blocks of generated tokens where each is as long as all
    before it together, so that long texts need few programs."""
    blocks, remaining = list[int](), max(gen_len - 1, 0)
    while remaining:
        blocks.append(min(remaining, max(kv_block_tokens, sum(blocks))))
        remaining -= blocks[-1]
    return tuple(blocks)


def generated_blocks(gen_len: int, kv_block_tokens: int) -> tuple[int, ...]:
    """Returns the token counts of the KV blocks of generated tokens; the last is never cached."""
    return cut(max(gen_len - 1, 0), kv_block_tokens)
