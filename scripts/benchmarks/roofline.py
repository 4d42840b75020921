"""The roofline of a run: bytes over bandwidth and FLOPs over peak, nothing else.

The cost model says what to expect; the roofline is the upper bound. Every resource is as fast
as its best measurement in the profile, RAM as its measurement of the largest size, and all of them
work at once, in each of the two phases. A run can beat it if the machine is faster than when it was
profiled, or if the page cache helps.
"""

from __future__ import annotations

from math import ceil

from flexgen_jax.models.config import DTYPES
from flexgen_jax.policy.hardware import HardwareProfile, Rate
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.costs import Costs

Seconds = dict[str, dict[str, float]]
"""Seconds that each resource needs, by phase and by the resource's name."""


def roofline(setting: Setting, policy: Policy, workload: Workload, hw: HardwareProfile) -> Seconds:
    """Returns the seconds that each resource needs at its best in "prefill" and in "decode".

    compute: 2 FLOPs per parameter and token, at the rate of the policy's `matmul_bits`. Unless
        prompts are scored, the head and the last layer, except for its keys and values, compute
        only one token of a prompt.
    memory: reading from RAM the KV cache that is attended to on the host, once a step; on a unified
        machine the weights in RAM, too.
    disk_read: reading the weights and full KV blocks that the policy keeps on disk, once a step,
        and the tables of embedding and head once a block.
    host_to_device: copies to the device; 0 on a unified machine.
    """
    costs = Costs(setting, policy, hw)
    rows, later = workload.num_sequences, workload.gen_len - 1
    blocks = ceil(rows / (policy.batch_size * policy.num_batches))
    decoders, head = costs.spec.decoders, costs.spec.head
    layers = len(decoders)
    ends = (*costs.spec.embedding.large, *head.large)
    tables = {t.key: costs.formats.weight(t).nbytes for t in ends}  # a shared one is read once
    # Cached tokens, and cached tokens in open blocks, summed over the decode steps.
    before = later * workload.prompt_len + later * (later - 1) // 2
    open_ = sum(new % policy.kv_block_tokens for new in range(later))
    each = layers * costs.mean(lambda layer: costs.kv_bytes(layer, rows, 1))
    prompt, last = workload.prompt_len, decoders[-1]
    products, of_last = sum(layer.active_size for layer in decoders), last.active_size
    asked = prompt if workload.scores_prompts else 1
    kept = last.kept_share
    # Of the last layer, all tokens take the products that make keys and values.
    prefilled = (products - (1 - kept) * of_last) * prompt + (1 - kept) * of_last * asked

    def phase(
        steps: int, computed: float, formed: int, once: float, cache: float, full: float
    ) -> dict[str, float]:
        flops = 2.0 * rows * (computed + formed * head.large_size)
        together = min(rows, policy.batch_size * policy.num_batches)
        each_layer = costs.mean(costs.layer_bytes)
        if not once:  # decoding
            each_layer = costs.mean(lambda layer: costs.decode_bytes(layer, together))
        weights = blocks * (steps * layers * each_layer + once)
        seconds = {"compute": flops / _peak(hw, policy.matmul_bits)}
        return seconds | _moving(policy, setting.dtype, hw, weights, cache, full)

    return {
        "prefill": phase(1, prefilled, asked, sum(tables.values()), 0, 0),
        "decode": phase(later, later * products, later, 0, each * before, each * (before - open_)),
    }


def bound_s(seconds: Seconds) -> float:
    """Returns the least seconds of a run.

    They are the sum of the slowest resource's seconds in each phase, since a block's second phase
    begins when its first one ends.
    """
    return sum(max(phase.values()) for phase in seconds.values())


def binding(seconds: Seconds) -> str:
    """Returns the slowest resource of the longer phase."""
    longer = max(seconds.values(), key=lambda phase: max(phase.values()))
    return max(longer, key=lambda name: longer[name])


def _moving(
    policy: Policy, dtype: str, hw: HardwareProfile, weights: float, cache: float, full: float
) -> dict[str, float]:
    """Returns the seconds of each resource but "compute" in one phase.

    weights: bytes of weights that are used, in all steps together; cache, full: bytes of KV cache
    before each new token, and of its full blocks.
    """
    attended = cache * (1 + policy.attention_sparsity) / 2  # all keys, and some of the values
    on_host = attended * (1 - policy.cache.device) if policy.values_stay else 0
    read = policy.weights.disk * weights + policy.cache.disk * full
    moved = (1 - policy.weights.device) * weights
    moved += policy.moved_share * (1 - policy.cache.device) * cache
    if hw.unified:
        on_host, moved = weights * (1 - policy.weights.disk) + attended, 0.0
    return {
        "disk_read": read / _best(hw.disk_read),
        "memory": on_host / _memory(hw, dtype),
        "host_to_device": moved / _best(hw.host_to_device),
    }


def _peak(hw: HardwareProfile, matmul_bits: int) -> float:
    """Returns the highest FLOP/s of products.

    8-bit products of packed kernels count, too: they can be faster than those of plain ones.
    """
    integers = hw.linear_int8.values() if matmul_bits == 8 else ()
    return max(map(_best, integers), default=_best(hw.linear[16]))


def _best(rate: Rate) -> float:
    return max(speed for _, speed in rate.points)


def _memory(hw: HardwareProfile, dtype: str) -> float:
    """Returns the byte/s at which decode attention reads a large KV cache in RAM.

    On a unified machine it is the faster of the device's and the host's attention. Rates of small
    sizes do not count: they come from the CPU's own caches, which cannot hold all layers' weights.
    """
    ways = (hw.host_attention, hw.device_attention) if hw.unified else (hw.host_attention,)
    return DTYPES[dtype] * max(way[16].points[-1][1] for way in ways)
