"""The cost model of the paper's appendix A.3, on the rates of a `HardwareProfile`.

`Costs` has the seconds of single operations, which the simulator uses too. `block_terms` adds
them up for one decoder layer and a block of batches, as functions that are linear in the nine
fractions of a policy, so that a linear program can choose the fractions. The model also covers
what the paper's leaves out: quantization, sparse attention, the place of attention, the row
schedule, fixed costs of steps, embedding and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.policy.hardware import TRANSFERS
from flexgen_jax.policy.policy import (
    Policy,
    Workload,
    generated_blocks,
    prompt_blocks,
    prompt_chunks,
)
from flexgen_jax.search.costs import Costs

FRACTIONS = ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")
"""The paper's nine variables: the fractions of weights, KV cache and hidden states (w, c, h) on
GPU, CPU and disk (g, c, d)."""

AWAY_W = {"wc": 1.0, "wd": 1.0}
AWAY_C = {"cc": 1.0, "cd": 1.0}
AWAY_H = {"hc": 1.0, "hd": 1.0}


@dataclass(frozen=True)
class LinearTerm:
    """A linear function of a policy's fractions: a constant, and coefficients by fraction."""

    factors: Mapping[str, float] = field(default_factory=dict)
    constant: float = 0.0

    def __add__(self, other: LinearTerm) -> LinearTerm:
        names = {**self.factors, **other.factors}
        total = {n: self.factors.get(n, 0.0) + other.factors.get(n, 0.0) for n in names}
        return LinearTerm(total, self.constant + other.constant)

    def __mul__(self, scale: float) -> LinearTerm:
        factors = {name: scale * factor for name, factor in self.factors.items()}
        return LinearTerm(factors, scale * self.constant)

    def at(self, fractions: Mapping[str, float]) -> float:
        return self.constant + sum(f * fractions[name] for name, f in self.factors.items())


def fractions_of(policy: Policy) -> dict[str, float]:
    """Returns a policy's nine fractions by the paper's names."""
    placements = (policy.weights, policy.cache, policy.activations)
    values = [
        share
        for placement in placements
        for share in (placement.device, placement.host, placement.disk)
    ]
    return dict(zip(FRACTIONS, values, strict=True))


@dataclass(frozen=True)
class BlockTerms:
    """Seconds that a block of batches takes at each resource, by phase.

    prefill, decode: for one decoder layer, and when decoding for one token, by resource (the
    paper's ctog, gtoc, dtoc and ctod under the names of `TRANSFERS`, and comp). T_pre and T_gen are
    at least the time of each resource. passes: steps after the prompt, equal to tokens without
    drafts; ends: seconds of embedding and head, for all tokens, and of guessing. sequences: number
    of sequences in the block; written: bytes that a block writes to the disk, where the block of
    generated tokens that is open in the end is not.
    """

    prefill: dict[str, LinearTerm]
    decode: dict[str, LinearTerm]
    layers: int
    passes: float
    ends: float
    sequences: int
    written: LinearTerm

    def total_s(self, prefill: float, decode: float) -> float:
        """Returns a block's seconds (the paper's T) from those of one layer, T_pre and T_gen."""
        return self.layers * (prefill + self.passes * decode) + self.ends

    def estimate(self, fractions: Mapping[str, float]) -> tuple[float, float]:
        """Returns a block's seconds of prefill and of decoding at the given fractions."""
        longest = [
            max(term.at(fractions) for term in terms.values())
            for terms in (self.prefill, self.decode)
        ]
        ends = self.ends / (1 + self.passes)
        first = self.layers * longest[0] + ends
        return first, self.passes * (self.layers * longest[1] + ends)


def block_terms(costs: Costs, workload: Workload) -> BlockTerms:
    """Returns the terms of a block of all the batches that `costs.policy` asks for."""
    policy = costs.policy
    rows, batches = policy.batch_size, policy.num_batches
    layers = len(costs.spec.decoders)
    formed = rows * (workload.prompt_len if workload.scores_prompts else policy.pass_tokens)
    passes = (workload.gen_len - 1) / costs.tokens_a_pass
    ends = (1 + passes) * batches * (costs.head_s(formed) + 2 * costs.hw.step_s + costs.draft_s)
    prefill, decode = _prefill(costs, workload), _decode(costs, workload)
    sealed = sum(generated_blocks(workload.gen_len, policy.kv_block_tokens)[:-1])
    written = decode.moved["disk_write"] * sealed + prefill.moved["disk_write"]
    return BlockTerms(
        prefill=_combine(costs, prefill, is_prefill=True),
        decode=_combine(costs, decode, is_prefill=False),
        layers=layers,
        passes=passes,
        ends=ends,
        sequences=rows * batches,
        written=written * layers,
    )


def _weights(costs: Costs, reads_ends: bool) -> tuple[LinearTerm, LinearTerm]:
    """Returns weights_ctog and weights_dtoc, in bytes per decoder layer.

    The weights of embedding and head are spread over the layers.
    """
    policy = costs.policy
    moves = 1 if policy.order.shares_weights else policy.num_batches
    tokens = policy.batch_size * (policy.num_batches if moves == 1 else 1) * policy.pass_tokens
    layer = costs.mean(
        costs.layer_bytes if reads_ends else lambda layer: costs.decode_bytes(layer, tokens)
    )
    ends = costs.end_bytes() / len(costs.spec.decoders)
    read = layer * moves + (ends if reads_ends else 0)
    stays = 0.0
    if policy.host_experts and not reads_ends:
        chosen, share = costs.setting.experts.chosen, costs.planned_host_share
        stays = costs.mean(
            lambda layer: share(layer, tokens) * chosen(layer, tokens) * costs.expert_bytes(layer)
        )
    copied = moves * (layer - stays + ends)
    return LinearTerm(AWAY_W) * copied, LinearTerm({"wd": float(read)})


class Work(NamedTuple):
    """One layer's resources for all batches of a group.

    moved: bytes by transfer, without reads of the KV cache; device, host: seconds of computing
    there; cached: seconds of reading the KV cache.
    """

    moved: dict[str, LinearTerm]
    device: LinearTerm
    host: LinearTerm = LinearTerm()
    cached: LinearTerm = LinearTerm()


def _prefill(costs: Costs, workload: Workload) -> Work:
    """Returns one layer's work for the prompts; its computing is the paper's comp^p."""
    policy, tokens = costs.policy, workload.prompt_len
    rows, batches = policy.batch_size, policy.num_batches
    cache = 0.0
    if workload.gen_len > 1:
        cache = batches * costs.mean(lambda layer: costs.kv_bytes(layer, rows, tokens))
        cache += batches * costs.mean(lambda layer: costs.state_bytes(layer, rows))
    hidden = batches * costs.hidden_bytes(rows, tokens)
    copied, read = _weights(costs, True)
    chunks = costs.chunks(tokens, workload.scores_prompts)
    shared = 0.0
    if workload.prefix_len:
        shared = costs.mean_prefill_s(1, workload.prefix_len, scores_prompts=False)
        shared = shared * workload.num_prefixes + _shared_s(costs, workload, tokens)
    waves, earlier = len(chunks), [sum(chunks[:n]) for n in range(1, len(chunks))]
    again = batches * costs.mean(lambda layer: costs.kv_bytes(layer, rows, 1)) * sum(earlier)
    again += batches * costs.mean(lambda layer: costs.state_bytes(layer, rows)) * len(earlier)
    moved = {
        "host_to_device": copied * waves + LinearTerm(AWAY_H) * hidden + LinearTerm(AWAY_C) * again,
        "device_to_host": LinearTerm(AWAY_C) * cache + LinearTerm(AWAY_H) * hidden,
        "disk_read": read * waves + LinearTerm({"hd": hidden}),
        "disk_write": LinearTerm({"cd": cache, "hd": hidden}),
    }
    computing = costs.mean_prefill_s(rows, tokens, workload.scores_prompts)
    seconds = batches * (computing + waves * costs.hw.step_s) + waves * costs.mean(costs.unpack_s)
    seconds += shared
    cached = sum(
        batches * costs.mean(lambda layer: costs.kv_read_s(layer, rows, chunks[:n]))  # noqa: B023
        for n in range(1, waves)
    )
    return Work(moved, LinearTerm({}, seconds), cached=LinearTerm({"cd": cached}))


def _shared_s(costs: Costs, workload: Workload, tokens: int) -> float:
    """Returns the seconds of a layer's attention from `tokens` tokens of each sequence of a block
    to the prefixes."""
    rows = costs.policy.batch_size * costs.policy.num_batches
    spans = max(workload.num_prefixes, costs.policy.num_batches)
    queries, prefix = rows * tokens // spans, workload.prefix_len
    return spans * costs.mean(lambda layer: costs.prefix_s(layer, queries, prefix))


def _decode(costs: Costs, workload: Workload) -> Work:
    """Returns one layer's work for one token, or one pass with guesses, on average: with s + n/2
    tokens before it."""
    policy, hw = costs.policy, costs.hw
    tokens = policy.pass_tokens
    rows, batches = policy.batch_size, policy.num_batches
    before = workload.prompt_len + workload.gen_len / 2
    mean, share = costs.mean, costs.moved_share
    moves = batches * mean(lambda layer: share(layer) * costs.kv_bytes(layer, rows, 1)) * before
    if workload.prefix_len:  # which are always moved to the device
        moves += workload.num_prefixes * mean(
            lambda layer: costs.kv_bytes(layer, 1, workload.prefix_len)
        )
    state = batches * mean(lambda layer: costs.state_bytes(layer, rows))
    hidden = 0 if costs.keeps_states(rows) else batches * costs.hidden_bytes(rows, tokens)
    token = batches * mean(lambda layer: costs.open_kv_bytes(layer, rows, tokens))
    query = batches * mean(lambda layer: costs.query_bytes(layer, rows))
    copied, read = _weights(costs, False)
    size = policy.kv_block_tokens
    query_copies = LinearTerm(AWAY_C) * (query if policy.values_stay else 0)
    on_device = batches * mean(lambda layer: costs.device_attention_s(layer, rows, before))
    moved = batches * mean(
        lambda layer: share(layer) * costs.device_attention_s(layer, rows, before)
    )
    on_host = batches * mean(
        lambda layer: (1 - share(layer)) * costs.host_attention_s(layer, rows, before)
    )
    sealed = batches * mean(lambda layer: costs.kv_bytes(layer, rows, size)) / size
    links = {
        "host_to_device": copied
        + LinearTerm(AWAY_H) * hidden
        + LinearTerm(AWAY_C) * (moves + state)
        + query_copies * 2,
        "device_to_host": LinearTerm(AWAY_H) * hidden
        + LinearTerm(AWAY_C) * (token + state)
        + query_copies,
        "disk_read": read + LinearTerm({"cd": state}),
        "disk_write": LinearTerm({"cd": sealed + state}),
    }
    chunks = costs.chunks(workload.prompt_len, workload.scores_prompts)
    prompt = chunks if len(chunks) > 1 else prompt_blocks(workload.prompt_len, size)
    generated = generated_blocks(workload.gen_len, size)
    half = workload.gen_len / 2 / max(sum(generated), 1)
    cached = mean(lambda layer: costs.kv_read_s(layer, rows, prompt))
    cached += half * mean(lambda layer: costs.kv_read_s(layer, rows, generated))
    if workload.prefix_len:
        shared = prompt_chunks(workload.prefix_len, policy.prefill_chunk)
        prefix_read_s = mean(lambda layer: costs.kv_read_s(layer, 1, shared))
        cached += workload.num_prefixes * prefix_read_s / batches
    products = mean(lambda layer: costs.linear_s(layer, rows * tokens))
    fixed = batches * (products + hw.step_s + (hw.split_s if policy.values_stay else 0))
    if workload.prefix_len:
        fixed += _shared_s(costs, workload, tokens)
    fixed += mean(costs.unpack_s)
    device = LinearTerm({"cg": on_device}, fixed) + LinearTerm(AWAY_C) * moved
    host = LinearTerm(AWAY_C) * on_host + LinearTerm(AWAY_W) * _host_experts_s(costs)
    return Work(links, device, host, LinearTerm({"cd": batches * cached}))


def _host_experts_s(costs: Costs) -> float:
    """Returns the seconds in which the CPU computes a layer's experts for all batches, if all lie
    on the host."""
    policy, chosen = costs.policy, costs.setting.experts.chosen
    if not policy.host_experts:
        return 0.0
    rows = policy.batch_size * policy.pass_tokens

    def seconds(layer: LayerSpec) -> float:
        share = costs.planned_host_share(layer, rows * policy.num_batches)
        if not share:
            return 0.0
        count = share * chosen(layer, rows)
        copied = (1 - share) * chosen(layer, rows)
        return costs.host_experts_s(layer, rows, count, copied) + costs.hw.split_s

    return policy.num_batches * costs.mean(seconds)


def _combine(costs: Costs, work: Work, is_prefill: bool) -> dict[str, LinearTerm]:
    """Returns the seconds of each resource; the longest of them decides.

    Within a layer, device matmuls overlap with CPU attention, for all batches but one. There is no
    overlap on a unified machine, where both need the cores, in a row schedule, which has no other
    batch, or with overlap turned off.
    """
    hw, policy, unified = costs.hw, costs.policy, costs.setting.unified
    seconds: dict[str, LinearTerm] = {}
    tensor_bytes = costs.tensor_bytes()
    for link in TRANSFERS:
        is_free = unified and link in ("host_to_device", "device_to_host")
        moved = work.moved[link]
        size = min(sum(moved.factors.values()) / 2, tensor_bytes) or 1.0
        seconds[link] = LinearTerm() if is_free else moved * (1 / getattr(hw, link).at(size))
    seconds["disk_read"] = seconds["disk_read"] + work.cached
    lost = LinearTerm()
    for link, term in seconds.items():
        drag, slowed = hw.contention(link, is_prefill) if policy.overlap else (1.0, 1.0)
        lost = lost + term * drag
        seconds[link] = term * slowed
    is_serial = unified or not policy.order.shares_weights or not policy.overlap
    exposed = 1.0 if is_serial else 1 / policy.num_batches
    together = work.host + work.device * exposed + lost
    alone = work.device + lost
    if not policy.copies_ahead:  # nothing is computed while a layer's weights are copied
        alone = alone + seconds["host_to_device"]
    return seconds | {"compute": alone, "host_compute": together}
