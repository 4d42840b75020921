"""A run's measurements."""

from __future__ import annotations

from typing import Any, TypedDict


class Report(TypedDict, total=False):
    """The measurements of a run; `docs/` says what each means. Seconds and bytes, unless a name
    says otherwise; bytes by link, peaks by tier."""

    model: str
    dtype: str
    notes: list[str]
    # Who makes the compute kernels: "cpu (...)", with the units of the processor; "triton", a GPU's
    # own; or "xla".
    kernels: str
    policy: dict[str, Any]
    prompt_len: int
    gen_len: int
    num_sequences: int
    num_tokens: int
    # Of the prompts, computed without and with those that fill up batches, not computed because
    # other prompts share them, and loaded from the KV store.
    prompt_tokens: int
    padded_prompt_tokens: int
    shared_prompt_tokens: int
    stored_prompt_tokens: int
    # Placing the weights, compiling so far, and within the run.
    init_s: float
    compile_s: float
    compile_in_run_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    # Tokens per second.
    generation_throughput: float
    prefill_throughput: float
    decode_throughput: float
    # Passes through the model after the prompts.
    decode_steps: int
    bytes: dict[str, int]
    decode_bytes: dict[str, int]
    # Seconds during which each resource was busy.
    busy_s: dict[str, float]
    # Seconds during which any link was busy, and any processor.
    any_busy_s: dict[str, float]
    # Bytes and seconds by resource, phase and content, with `breakdown`.
    breakdown: list[dict[str, Any]]
    guessed_experts: dict[str, int]
    # Hits and misses of the device's cache of experts.
    cached_experts: dict[str, int]
    # Of guessed tokens, see `offload.speculation.Acceptance`; and how many tokens of a text a pass
    # found.
    drafts: dict[str, Any]
    tokens_a_pass: float
    # Of the KV store: bytes written, and files evicted, by this process.
    kv_store_written: int
    kv_store_evicted: int
    # Bytes that the operating system read from disks; None if unknown.
    storage_read_bytes: int | None
    peak_bytes: dict[str, int]
    device_peak_bytes: int | None
    computed_peak_bytes: dict[str, int]
    compiled_workspace_bytes: int
    # The fractions of the bytes that each tier really got.
    realized: dict[str, dict[str, float]]
    predicted: dict[str, Any] | None
    # Of stages, the report of each.
    stages: list[dict[str, Any]]
