"""Options of `LLM`, the command line and benchmarks: one dataclass for all three."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from flexgen_jax.errors import UserError
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.formats.known import WeightFormat
from flexgen_jax.models.loading import Model, open_model
from flexgen_jax.policy.policy import Attention, Policy
from flexgen_jax.progress import Bars
from flexgen_jax.units import parse_bytes

DRAFT_TOKENS = 4
"""Tokens that are guessed for a pass where nobody says how many."""

LOOKUP, SELF_4BIT = "lookup", "self-4bit"
"""What may guess tokens, besides a model."""


@dataclass(frozen=True)
class EngineOptions:
    """The model, the placement of its data, and its budgets.

    model: a Hugging Face folder, a hub id, a known shape's name with `dummy_weights`, or None
        for the small model that ships with the package.
    policy: a `Policy`, or "auto" to search one for each workload. For long
        runs it first probes this machine for some seconds, once.
    dtype: "float32", "bfloat16", "float16", or "auto" for the checkpoint's (on the CPU bfloat16
        instead of float16).
    weight_bits, cache_bits: 8 or 4 keeps weights, or full KV blocks, in that many bits an element;
        16 is the dtype. A model that is published in few bits keeps its own weights by default.
    requantize: whether `weight_bits` may round weights again that are published in few bits.
    weight_format: how `weight_bits` quantizes: "own" in groups along the input, or "paper".
    matmul_bits: 8 has decoder layers multiply integers of 8 bits, which costs some quality; faster
        with 4-bit weights on CPUs that have AMX, or AVX-512 with bfloat16 and VNNI, slower
        elsewhere.
    attention, attention_sparsity, prefill_chunk: see `Policy`. For these six, None means the
        policy's value.
    draft: the drafter for speculative decoding: "lookup", what
        followed the same tokens in the text so far; "self-4bit", the model itself with weights in 4
        bits; or a smaller model with the same tokens, named as `model` is. A model that guesses
        lies on the device as a whole. None guesses nothing.
    draft_tokens: how many are guessed for a pass, `DRAFT_TOKENS` by default.
    device_memory, host_memory, disk_space: budgets in bytes or as "16GB"; None is the available
        memory.
    write_limit: bytes that a plan may write to the disk a day, since that wears an SSD; None is
        without a limit. Weights, which are stored once, do not count.
    offload_dir: where the disk tier lies, and what later runs use again; None is the user's cache.
    kv_store: bytes of disk, or "20GB", for the KV cache of prompts and completions; later requests
        and runs with the same prefix load it; None keeps nothing.
    kv_store_dir: its folder; None is the user's cache.
    prefix_sharing: whether prefixes that requests share are found, and computed once.
    dummy_weights: random weights of a known shape, instead of a checkpoint's.
    seed: of random weights; sampling has the seeds of `SamplingParams`.
    progress: whether progress bars are shown; "placing" leaves out that of tokens.
    unified: whether host and device are one RAM; None is so on a CPU.
    hardware: the profile to plan with: a file or a known machine's name; None is this machine's.
    breakdown: whether the report has the busy time of the device and of its links, which costs some
        speed; so it has with a trace.
    trace: a file for a timeline of all transfers and computations, for ui.perfetto.dev.
    stages: processes that the model's layers are divided over, each with a device of its own: a
        GPU, or a share of the cores. Budgets are each stage's. coordinator: "HOST:PORT", where
        stages of other machines join; then only the first stage is started here.
    sets_up_jax: whether `set_up_jax` is called, which has JAX keep compiled programs for later
        processes, and use most of a GPU's memory.
    """

    model: str | Path | Model | None = None
    policy: Policy | Literal["auto"] = "auto"
    dtype: str = "auto"
    weight_bits: int | None = None
    requantize: bool = False
    cache_bits: int | None = None
    matmul_bits: int | None = None
    weight_format: WeightFormat | None = None
    attention: Attention | None = None
    attention_sparsity: float | None = None
    prefill_chunk: int | None = None
    draft: str | Path | Model | None = None
    draft_tokens: int | None = None
    device_memory: str | int | None = None
    host_memory: str | int | None = None
    disk_space: str | int | None = None
    write_limit: str | int | None = None
    offload_dir: str | Path | None = None
    kv_store: str | int | None = None
    kv_store_dir: str | Path | None = None
    prefix_sharing: bool = True
    dummy_weights: bool = False
    seed: int = 0
    progress: Bars = False
    unified: bool | None = None
    hardware: str | Path | None = None
    breakdown: bool = False
    trace: str | Path | None = None
    stages: int = 1
    coordinator: str | None = None
    sets_up_jax: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.stages, int) or self.stages < 1:
            raise UserError(f"stages must be at least 1, not {self.stages!r}")
        if self.coordinator is not None and self.stages == 1:
            raise UserError("a coordinator needs several stages: add --stages N (stages=N)")
        if self.draft_tokens is not None and self.draft is None:
            raise UserError('draft_tokens needs a drafter, for example draft="lookup"')
        if self.draft is not None and self.stages > 1:
            raise UserError("draft cannot be combined with stages")
        if self.policy != "auto" and not isinstance(self.policy, Policy):
            raise UserError(
                f'policy must be "auto" or a Policy, e.g. Policy.from_percent(...), not '
                f"{self.policy!r}"
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """All options by name, as `LLM` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def budgets(self) -> tuple[int | None, int | None, int | None]:
        """Bytes of device memory, host memory and disk; raises `UserError` for no size."""
        return (
            parse_bytes(self.device_memory, "device_memory"),
            parse_bytes(self.host_memory, "host_memory"),
            parse_bytes(self.disk_space, "disk_space"),
        )

    @property
    def is_auto(self) -> bool:
        """Whether the policy is searched."""
        return self.policy == "auto"

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of the policy that are given apart from it."""
        values = {name: getattr(self, name) for name in CHANGES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def base_policy(self) -> Policy:
        """The policy with these changes; where it is searched, what the search starts from."""
        policy = replace(Policy() if self.policy == "auto" else self.policy, **self.changes)
        if self.draft is None:
            return policy
        count = DRAFT_TOKENS if self.draft_tokens is None else self.draft_tokens
        return replace(policy, draft_tokens=count)

    def open_model(self) -> Model:
        """Opens the model; raises `UserError` if that is not possible."""
        if self.stages > 1 and isinstance(self.model, Model):
            raise UserError("stages need a model in a folder, which other processes can open")
        return open_model(
            name=self.model,
            dummy_weights=self.dummy_weights,
            seed=self.seed,
            weight_bits=self.weight_bits,
            requantizes=self.requantize,
        )

    def policy_on(self, unified: bool, config: ModelConfig) -> Policy:
        """The policy of a model's run where host and device are one RAM, or are not."""
        policy = self.base_policy
        if config.published is not None and self.weight_bits is None:
            policy = replace(policy, weight_bits=config.published.bits)
        if not self.is_auto and unified and policy.attention == "auto" and not policy.is_sparse:
            return replace(policy, attention="device")  # the same memory, and one program a step
        return policy


CHANGES = (
    "weight_bits",
    "cache_bits",
    "matmul_bits",
    "weight_format",
    "attention",
    "attention_sparsity",
    "prefill_chunk",
)
"""Options that change a policy and fix none: the search continues with them."""
