"""The cost model of the paper's appendix A.3, on the rates of a `HardwareProfile`.

`Costs` has the seconds of single operations, which the simulator uses too. `block_terms` adds
them up for one decoder layer and a block of batches, as functions that are linear in the nine
fractions of a policy, so that a linear program can choose the fractions. The model also covers
what the paper's leaves out: quantization, sparse attention, the place of attention, the row
schedule, fixed costs of steps, embedding and head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from flexgen_jax.models.config import DTYPES, ModelConfig
from flexgen_jax.models.spec import Formats, LayerSpec, ModelSpec, TensorSpec, model_spec
from flexgen_jax.policy.hardware import TRANSFERS, HardwareProfile
from flexgen_jax.policy.placement import stays_on_device
from flexgen_jax.policy.plan import BlockPlan, BlockShape, few_are_chosen
from flexgen_jax.policy.policy import (
    Policy,
    Workload,
    generated_blocks,
    prompt_blocks,
    prompt_chunks,
)

FRACTIONS = ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")
"""The paper's nine variables: the fractions of weights, KV cache and hidden states (w, c, h) on
GPU, CPU and disk (g, c, d)."""

UNPACK_ROWS = 16
"""Rows of the products whose times, with packed and with plain weights, tell that of unpacking."""

AWAY_W = {"wc": 1.0, "wd": 1.0}
AWAY_C = {"cc": 1.0, "cd": 1.0}
AWAY_H = {"hc": 1.0, "hd": 1.0}


@dataclass(frozen=True)
class Linear:
    """A linear function of a policy's fractions: a constant, and coefficients by fraction."""

    factors: Mapping[str, float] = field(default_factory=dict)
    constant: float = 0.0

    def __add__(self, other: Linear) -> Linear:
        names = {**self.factors, **other.factors}
        total = {n: self.factors.get(n, 0.0) + other.factors.get(n, 0.0) for n in names}
        return Linear(total, self.constant + other.constant)

    def __mul__(self, scale: float) -> Linear:
        factors = {name: scale * factor for name, factor in self.factors.items()}
        return Linear(factors, scale * self.constant)

    def at(self, fractions: Mapping[str, float]) -> float:
        return self.constant + sum(f * fractions[name] for name, f in self.factors.items())


def fractions_of(policy: Policy) -> dict[str, float]:
    """Returns a policy's nine fractions by the paper's names."""
    parts = (policy.weights, policy.cache, policy.activations)
    values = [share for part in parts for share in (part.device, part.host, part.disk)]
    return dict(zip(FRACTIONS, values, strict=True))


class Costs:
    """Seconds and bytes of single operations of one model on one machine.

    Costs that differ from layer to layer take a decoder layer; `mean` averages over all of them.
    """

    def __init__(self, config: ModelConfig, dtype: str, policy: Policy, hw: HardwareProfile):
        self.config, self.hw, self.policy = config, hw, policy
        self.formats: Formats = policy.formats(dtype)
        self.spec: ModelSpec = model_spec(config)
        self._item = DTYPES[dtype]
        self.unpacks = not config.has_experts and policy.unpacks(hw.sizes, policy.num_batches)
        bits = 16 if self.unpacks else policy.weight_bits
        self._linear = hw.products(bits, policy.matmul_bits)
        self._ends = hw.linear[policy.weight_bits]
        self._device = hw.device_attention[policy.cache_bits]
        self._host = hw.host_attention[policy.cache_bits]
        kept = policy.attention_sparsity
        self._read_share = (1 + kept) / 2  # all keys are read, and the values attended to

    def plan(self, shape: BlockShape, unified: bool) -> BlockPlan:
        """Returns the plan of a block of batches."""
        dtype, sizes = self.formats.dtype, self.hw.sizes
        return BlockPlan(self.config, dtype, self.policy, shape, unified, sizes)

    def mean(self, cost: Callable[[LayerSpec], float]) -> float:
        """Returns the average of a decoder layer's cost over all decoder layers."""
        (first, count), *others = self.spec.decoder_kinds
        if not others:
            return cost(first)
        total = count * cost(first) + sum(n * cost(layer) for layer, n in others)
        return total / len(self.spec.decoders)

    def linear_s(self, layer: LayerSpec, rows: float) -> float:
        """Seconds of a decoder layer's products: the paper's linear_layer, 8 h1^2 + 4 h1 h2 FLOPs
        per row.

        Of experts, those are expected that are chosen if all are chosen equally often, each with
        its share of the rows.
        """
        experts = layer.experts
        if experts is None:
            return self._linear.seconds(layer.flops(rows), rows)
        routed = 2.0 * rows * experts.top * layer.expert_size
        shared = self._linear.seconds(layer.flops(rows) - routed, rows)
        return shared + self.experts_s(layer, rows)

    def experts_s(self, layer: LayerSpec, rows: float) -> float:
        """Seconds of the products of a layer's experts, a part of `linear_s`."""
        if layer.experts is None:
            return 0.0
        routed = 2.0 * rows * layer.experts.top * layer.expert_size
        each = rows * layer.experts.top / layer.chosen_experts(rows)
        return self._linear.seconds(routed, each)

    def unpack_s(self, layer: LayerSpec) -> float:
        """Seconds of unpacking a decoder layer's weights for all batches of a visit; 0 if each
        product unpacks its own."""
        if not self.unpacks:
            return 0.0
        flops = 2.0 * UNPACK_ROWS * layer.large_size
        packed = self.hw.products(self.policy.weight_bits, 16)
        return max(
            0.0, packed.seconds(flops, UNPACK_ROWS) - self._linear.seconds(flops, UNPACK_ROWS)
        )

    def project_s(self, layer: LayerSpec, rows: int) -> float:
        """Seconds of a decoder layer's products before attention, a part of `linear_s`."""
        return layer.projected_share * self.linear_s(layer, rows)

    def prefill_s(
        self, layer: LayerSpec, rows: int, tokens: int, only_last: bool = False, before: int = 0
    ) -> float:
        """Seconds of a layer's prefill (comp^p): products, quantization, and attention with
        4 s^2 h1 FLOPs per sequence.

        only_last: for the last layer, which computes keys and values of all tokens, and everything
        else of one token per sequence. before: number of earlier tokens to which a chunk of a
        prompt attends.
        """
        if only_last:
            group = self.hw.sizes.prefill_sequences(rows, tokens, self.policy.weight_bits)
            rest = rows / group * self.linear_s(layer, group)  # by groups, as all of a prefill
            kept = layer.kept_share
            seconds = kept * self.linear_s(layer, rows * tokens) + (1 - kept) * rest
            attention = self.hw.device_attention[16]
            seconds += attention.seconds(self.kv_elements(layer, rows, tokens))
        else:
            scores = layer.attention.prefill_flops(rows, tokens, before)
            seconds = self.linear_s(layer, rows * tokens)
            seconds += self.hw.prefill_attention.seconds(scores, tokens)
        if before:
            seconds += self._device.seconds(self.kv_elements(layer, rows, before))
        if self.policy.cache_bits < 16:
            seconds += self.quantize_s(self.kv_elements(layer, rows, tokens))
        return seconds

    def mean_prefill_s(self, rows: int, tokens: int, scores_prompts: bool) -> float:
        """Seconds of one layer's prefill, the average over all layers; in chunks as the policy
        says."""
        layers, last = len(self.spec.decoders), self.spec.decoders[-1]
        chunks = self.chunks(tokens, scores_prompts)
        seconds = 0.0
        for before, chunk in zip(accumulate((0, *chunks)), chunks, strict=False):
            args = (rows, chunk)
            whole = self.mean(lambda layer: self.prefill_s(layer, *args, before=before))  # noqa: B023
            saved = self.prefill_s(last, *args, before=before) - self.prefill_s(
                last, *args, not scores_prompts, before
            )
            seconds += whole - saved / layers
        return seconds

    def prefix_s(self, layer: LayerSpec, tokens: int, prefix: int) -> float:
        """Seconds of a layer's attention from so many tokens, of all rows, to the prefix that they
        share."""
        scores = layer.attention.prefill_flops(1, tokens, prefix)
        scores -= layer.attention.prefill_flops(1, tokens)
        seconds = self.hw.prefill_attention.seconds(scores, prefix)
        return seconds + self._device.seconds(self.kv_elements(layer, 1, prefix))

    def chunks(self, prompt_len: int, scores_prompts: bool) -> tuple[int, ...]:
        """Returns the token counts of the chunks in which a prompt is prefilled."""
        chunk = prompt_len if scores_prompts else self.policy.prefill_chunk
        return prompt_chunks(prompt_len, chunk)

    def quantize_s(self, elements: float) -> float:
        return self.hw.quantize.seconds(elements)

    def kv_elements(self, layer: LayerSpec, rows: int, tokens: float) -> float:
        """Elements of a layer's keys and values."""
        return 2.0 * rows * tokens * layer.attention.kv_size

    def device_attention_s(self, layer: LayerSpec, rows: int, tokens: float) -> float:
        """Seconds of a layer's decode attention on the device (att^g on bmm_flops)."""
        seconds = self._device.seconds(self.kv_elements(layer, rows, tokens))
        if self.policy.is_sparse:
            ranking = self._rank_s(layer, rows, tokens, on_host=False)
            seconds = seconds * self._read_share + ranking
        return seconds

    def host_attention_s(self, layer: LayerSpec, rows: int, tokens: float) -> float:
        """Seconds of a layer's decode attention on the CPU (att^g on cpu_flops)."""
        seconds = self._host.seconds(self.kv_elements(layer, rows, tokens))
        if self.policy.is_sparse:
            ranking = self._rank_s(layer, rows, tokens, on_host=True)
            seconds = seconds * self._read_share + ranking
        return seconds

    def split_attention_s(
        self, layer: LayerSpec, rows: int, here: float, there: float
    ) -> tuple[float, float]:
        """Seconds of a layer's decode attention on the device and on the CPU.

        here: number of tokens on the device; there: number of tokens whose values stay on the host.
        With sparse attention on the device, the keys of the latter are moved to it.
        """
        device = self.device_attention_s(layer, rows, here) if here else 0.0
        if self.policy.attends_on_host:
            return device, self.host_attention_s(layer, rows, there)
        elements = self.kv_elements(layer, rows, there)
        keys = self._device.seconds(elements) / 2 + self._rank_s(layer, rows, there, on_host=False)
        values = self._host.seconds(elements) * self.policy.attention_sparsity / 2
        return device + keys, values

    def _rank_s(self, layer: LayerSpec, rows: int, tokens: float, on_host: bool) -> float:
        rank = self.hw.host_rank if on_host else self.hw.device_rank
        return rank.seconds(rows * layer.attention.num_heads * tokens)

    def head_s(self, rows: int) -> float:
        """Seconds of the head's product."""
        return self._ends.seconds(self.spec.head.flops(rows), rows)

    def kv_bytes(self, layer: LayerSpec, rows: int, tokens: int) -> int:
        """Bytes of a layer's sealed keys and values."""
        return self.formats.kv_bytes(layer.attention.kv_shape(rows, tokens))

    def open_kv_bytes(self, layer: LayerSpec, rows: int, tokens: int) -> int:
        """Bytes of a layer's keys and values in full precision."""
        return self.formats.open_kv_bytes(layer.attention.kv_shape(rows, tokens))

    def query_bytes(self, layer: LayerSpec, rows: int) -> int:
        """Bytes of a token's queries."""
        return rows * layer.attention.query_size * self._item

    def kv_read_s(self, layer: LayerSpec, rows: int, lengths: Iterable[int]) -> float:
        """Seconds of reading a layer's sealed blocks of these lengths from disk, one by one."""
        read = self.hw.disk_read
        return sum(
            count * read.seconds(self.kv_bytes(layer, rows, tokens))
            for tokens, count in Counter(lengths).items()
        )

    def hidden_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of the hidden states between two layers."""
        return self.spec.hidden_bytes(rows, tokens, self.formats.dtype)

    def keeps_states(self, rows: int) -> bool:
        """Returns whether a batch's hidden states of one token stay on the device, whatever the
        policy says."""
        return stays_on_device(1, self.hidden_bytes(rows, 1))

    def layer_bytes(self, layer: LayerSpec) -> int:
        """Bytes of a layer's large tensors, which a policy places."""
        return sum(n * self.formats.weight(t).nbytes for t, n in layer.large_shapes)

    def decode_bytes(self, layer: LayerSpec, rows: int) -> float:
        """Bytes of the large tensors that a decode step of `rows` sequences needs of a layer: all,
        or of experts those that are expected to be chosen, if they are few."""
        if not few_are_chosen(layer, rows):
            return self.layer_bytes(layer)
        assert layer.experts is not None, "few of them are chosen"
        experts = [(t, n) for t, n in layer.large_shapes if t.expert is not None]
        nbytes = sum(n * self.formats.weight(t).nbytes for t, n in experts)
        unchosen = 1 - layer.chosen_experts(rows) / layer.experts.count
        return self.layer_bytes(layer) - nbytes * unchosen

    def end_bytes(self) -> int:
        """Bytes of the large tensors of embedding and head; a shared table counts twice."""
        return sum(self.formats.weight(t).nbytes for t in self._end_tensors())

    def end_bytes_held(self) -> int:
        """Bytes of the large tensors of embedding and head; a shared table counts once."""
        held = {t.key: self.formats.weight(t).nbytes for t in self._end_tensors()}
        return sum(held.values())

    def _end_tensors(self) -> list[TensorSpec]:
        return [t for end in (self.spec.embedding, self.spec.head) for t in end.large]


@dataclass(frozen=True)
class BlockTerms:
    """Seconds that a block of batches takes at each resource, by phase.

    prefill, decode: for one decoder layer, and when decoding for one token, by resource (the
    paper's ctog, gtoc, dtoc and ctod under the names of `TRANSFERS`, and comp). T_pre and T_gen are
    at least as long as each of them. ends: seconds of embedding and head, for all tokens.
    sequences: number of sequences in the block; written: bytes that a block writes to the disk,
    where the block of generated tokens that is open in the end is not.
    """

    prefill: dict[str, Linear]
    decode: dict[str, Linear]
    layers: int
    tokens: int
    ends: float
    sequences: int
    written: Linear

    def total_s(self, prefill: float, decode: float) -> float:
        """Returns a block's seconds (the paper's T) from those of one layer, T_pre and T_gen."""
        return self.layers * (prefill + (self.tokens - 1) * decode) + self.ends

    def estimate(self, fractions: Mapping[str, float]) -> tuple[float, float]:
        """Returns a block's seconds of prefill and of decoding at the given fractions."""
        longest = [
            max(term.at(fractions) for term in terms.values())
            for terms in (self.prefill, self.decode)
        ]
        ends = self.ends / self.tokens
        first = self.layers * longest[0] + ends
        return first, (self.tokens - 1) * (self.layers * longest[1] + ends)


def block_terms(costs: Costs, workload: Workload, unified: bool) -> BlockTerms:
    """Returns the terms of a block of all the batches that `costs.policy` asks for."""
    policy = costs.policy
    rows, batches = policy.batch_size, policy.num_batches
    layers = len(costs.spec.decoders)
    formed = rows * (workload.prompt_len if workload.scores_prompts else 1)
    ends = workload.gen_len * batches * (costs.head_s(formed) + 2 * costs.hw.step_s)
    prefill, decode = _prefill(costs, workload), _decode(costs, workload)
    sealed = sum(generated_blocks(workload.gen_len, policy.kv_block_tokens)[:-1])
    written = decode.moved["disk_write"] * sealed + prefill.moved["disk_write"]
    return BlockTerms(
        prefill=_combine(costs, prefill, unified, is_prefill=True),
        decode=_combine(costs, decode, unified, is_prefill=False),
        layers=layers,
        tokens=workload.gen_len,
        ends=ends,
        sequences=rows * batches,
        written=written * layers,
    )


def _weights(costs: Costs, reads_ends: bool) -> tuple[Linear, Linear]:
    """Returns weights_ctog and weights_dtoc, in bytes per decoder layer.

    The weights of embedding and head are spread over the layers.
    """
    policy = costs.policy
    moves = 1 if policy.order.shares_weights else policy.num_batches
    rows = policy.batch_size * (policy.num_batches if moves == 1 else 1)
    layer = costs.mean(
        costs.layer_bytes if reads_ends else lambda layer: costs.decode_bytes(layer, rows)
    )
    ends = costs.end_bytes() / len(costs.spec.decoders)
    read = layer * moves + (ends if reads_ends else 0)
    return Linear(AWAY_W) * (moves * (layer + ends)), Linear({"wd": float(read)})


class Work(NamedTuple):
    """What one layer needs for all batches of a block.

    moved: bytes by transfer, without reads of the KV cache; device, host: seconds of computing
    there; cached: seconds of reading the KV cache.
    """

    moved: dict[str, Linear]
    device: Linear
    host: Linear = Linear()
    cached: Linear = Linear()


def _prefill(costs: Costs, workload: Workload) -> Work:
    """Returns one layer's work for the prompts; its computing is the paper's comp^p."""
    policy, tokens = costs.policy, workload.prompt_len
    rows, batches = policy.batch_size, policy.num_batches
    cache = 0.0
    if workload.gen_len > 1:
        cache = batches * costs.mean(lambda layer: costs.kv_bytes(layer, rows, tokens))
    hidden = batches * costs.hidden_bytes(rows, tokens)
    copied, read = _weights(costs, True)
    chunks = costs.chunks(tokens, workload.scores_prompts)
    prefix, shared = workload.prefix_len, 0.0
    if prefix:
        shared = costs.mean_prefill_s(1, prefix, scores_prompts=False)
        shared += batches * costs.mean(lambda layer: costs.prefix_s(layer, rows * tokens, prefix))
    waves, earlier = len(chunks), [sum(chunks[:n]) for n in range(1, len(chunks))]
    again = batches * costs.mean(lambda layer: costs.kv_bytes(layer, rows, 1)) * sum(earlier)
    moved = {
        "host_to_device": copied * waves + Linear(AWAY_H) * hidden + Linear(AWAY_C) * again,
        "device_to_host": Linear(AWAY_C) * cache + Linear(AWAY_H) * hidden,
        "disk_read": read * waves + Linear({"hd": hidden}),
        "disk_write": Linear({"cd": cache, "hd": hidden}),
    }
    computing = costs.mean_prefill_s(rows, tokens, workload.scores_prompts)
    seconds = batches * (computing + waves * costs.hw.step_s) + waves * costs.mean(costs.unpack_s)
    seconds += shared
    cached = sum(
        batches * costs.mean(lambda layer: costs.kv_read_s(layer, rows, chunks[:n]))  # noqa: B023
        for n in range(1, waves)
    )
    return Work(moved, Linear({}, seconds), cached=Linear({"cd": cached}))


def _decode(costs: Costs, workload: Workload) -> Work:
    """Returns one layer's work for one token, on average: with s + n/2 tokens before it."""
    policy, hw = costs.policy, costs.hw
    rows, batches = policy.batch_size, policy.num_batches
    before = workload.prompt_len + workload.gen_len / 2
    mean = costs.mean
    cache = batches * mean(lambda layer: costs.kv_bytes(layer, rows, 1)) * before
    hidden = 0 if costs.keeps_states(rows) else batches * costs.hidden_bytes(rows, 1)
    token = batches * mean(lambda layer: costs.open_kv_bytes(layer, rows, 1))
    query = batches * mean(lambda layer: costs.query_bytes(layer, rows))
    copied, read = _weights(costs, False)
    moved_share, size = policy.moved_share, policy.kv_block_tokens
    asked = Linear(AWAY_C) * (query if policy.values_stay else 0)
    on_device = batches * mean(lambda layer: costs.device_attention_s(layer, rows, before))
    on_host = batches * mean(lambda layer: costs.host_attention_s(layer, rows, before))
    on_host *= 1 - moved_share
    sealed = batches * mean(lambda layer: costs.kv_bytes(layer, rows, size)) / size
    moved = {
        "host_to_device": copied
        + Linear(AWAY_H) * hidden
        + Linear(AWAY_C) * (moved_share * cache)
        + asked * 2,
        "device_to_host": Linear(AWAY_H) * hidden + Linear(AWAY_C) * token + asked,
        "disk_read": read,
        "disk_write": Linear({"cd": sealed}),
    }
    chunks = costs.chunks(workload.prompt_len, workload.scores_prompts)
    prompt = chunks if len(chunks) > 1 else prompt_blocks(workload.prompt_len, size)
    new = generated_blocks(workload.gen_len, size)
    half = workload.gen_len / 2 / max(sum(new), 1)
    cached = mean(lambda layer: costs.kv_read_s(layer, rows, prompt))
    cached += half * mean(lambda layer: costs.kv_read_s(layer, rows, new))
    products = mean(lambda layer: costs.linear_s(layer, rows))
    fixed = batches * (products + hw.step_s + (hw.split_s if policy.values_stay else 0))
    if workload.prefix_len:
        fixed += batches * mean(lambda layer: costs.prefix_s(layer, rows, workload.prefix_len))
    fixed += mean(costs.unpack_s)
    device = Linear({"cg": on_device}, fixed) + Linear(AWAY_C) * (moved_share * on_device)
    return Work(moved, device, Linear(AWAY_C) * on_host, Linear({"cd": batches * cached}))


def _combine(costs: Costs, work: Work, unified: bool, is_prefill: bool) -> dict[str, Linear]:
    """Returns the seconds of each resource; the longest of them decides.

    Within a layer, the device's products run beside the CPU's attention, for all batches but one.
    Nothing runs beside it on a unified machine, where both need the cores, in a row schedule, which
    has no other batch, or without overlap, where everything waits for what comes before.
    """
    hw, policy = costs.hw, costs.policy
    seconds: dict[str, Linear] = {}
    for link in TRANSFERS:
        is_free = unified and link in ("host_to_device", "device_to_host")
        moved = work.moved[link]
        size = sum(moved.factors.values()) / 2 or 1.0
        seconds[link] = Linear() if is_free else moved * (1 / getattr(hw, link).at(size))
    seconds["disk_read"] = seconds["disk_read"] + work.cached
    lost = Linear()
    for link, term in seconds.items():
        drag, slowed = hw.contention(link, is_prefill) if policy.overlap else (1.0, 1.0)
        lost = lost + term * drag
        seconds[link] = term * slowed
    is_serial = unified or not policy.order.shares_weights or not policy.overlap
    exposed = 1.0 if is_serial else 1 / policy.num_batches
    together = work.host + work.device * exposed + lost
    return seconds | {"compute": work.device + lost, "host_compute": together}
