"""The roofline of a run: bytes over bandwidth and FLOPs over peak, nothing else.

Where the cost model says what to expect, this says what could be had: every resource is as fast
as its best measurement in the profile, and all of them work at the same time. A machine that was
faster during the run than while it was profiled can beat it, and so can the page cache.
"""

from __future__ import annotations

from math import ceil

from flexgen_jax.config import DTYPES, ModelConfig
from flexgen_jax.policy.cost_model import Costs
from flexgen_jax.policy.hardware import HardwareProfile, Rate
from flexgen_jax.policy.policy import Policy, Workload


def roofline(
    config: ModelConfig, dtype: str, policy: Policy, workload: Workload, hw: HardwareProfile
) -> dict[str, float]:
    """Seconds that each resource needs at its best, by name; the largest bounds the run.

    compute: 2 FLOPs a parameter and token. memory: weights and the KV cache that is attended to on
    the host, once a step, from RAM. disk_read: what the policy keeps there, once a step, the tables
    of both ends once a block. host_to_device: what is not on the device; 0 on a unified machine.
    """
    costs = Costs(config, dtype, policy, hw)
    rows, tokens = workload.num_sequences, workload.gen_len
    blocks = ceil(rows / (policy.batch_size * policy.num_batches))
    layers = config.num_layers
    # Tokens before the new one, added up over the decode steps; and those in full blocks.
    before = (tokens - 1) * workload.prompt_len + (tokens - 1) * (tokens - 2) // 2
    full = policy.kv_block_tokens
    open_ = sum(new % full for new in range(tokens - 1))
    each = layers * costs.kv_bytes(rows, 1)
    cache, on_disk = each * before, each * (before - open_)
    attended = cache * (1 + policy.attention_sparsity) / 2  # all keys, and some of the values
    ends = (*costs.layers[0].large, *costs.layers[-1].large)
    tables = {t.key: costs.formats.weight(t).nbytes for t in ends}  # a shared one is read once
    weights = blocks * (tokens * layers * costs.layer_bytes() + sum(tables.values()))
    on_host = attended * (1 - policy.cache.device) if policy.values_stay else 0
    seconds = {
        "compute": _flops(costs, workload) / _best(hw.linear[16]),
        "disk_read": (policy.weights.disk * weights + policy.cache.disk * on_disk)
        / _best(hw.disk_read),
        "memory": on_host / _memory(hw, dtype),
        "host_to_device": 0.0,
    }
    if hw.unified:
        in_ram = weights * (1 - policy.weights.disk)
        seconds["memory"] = (in_ram + attended) / _memory(hw, dtype)
    else:
        moved = (1 - policy.weights.device) * weights
        moved += policy.moved_share * (1 - policy.cache.device) * cache
        seconds["host_to_device"] = moved / _best(hw.host_to_device)
    return seconds


def _flops(costs: Costs, workload: Workload) -> float:
    """Of the products of all layers, and of the head for each new token."""
    each = workload.prompt_len + workload.gen_len - 1
    decoders = costs.config.num_layers * costs.layers[1].large_size * each
    head = costs.layers[-1].large_size * workload.gen_len
    return 2.0 * workload.num_sequences * (decoders + head)


def _best(rate: Rate) -> float:
    return max(speed for _, speed in rate.points)


def _memory(hw: HardwareProfile, dtype: str) -> float:
    """Byte/s at which decode attention reads a cache of the model's dtype on the host."""
    return DTYPES[dtype] * _best(hw.host_attention[16])
