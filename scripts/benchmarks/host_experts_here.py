"""Measures experts that the CPU computes, next to a device that this machine only simulates.

    python scripts/benchmarks/host_experts_here.py

Two of XLA's CPU devices stand for a GPU and for the CPU next to it, and copies to the first wait as
long as a slow link would take. Prints the rate of computing experts on the CPU next to the rate of
reading memory, the cost of handing over a layer's hidden states, and a table with the token/s of
runs and of the simulator, by the share of experts that the CPU computes. The simulator knows the
rates that are measured here, and the time of a step without copies.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["NPROC"] = "8"  # XLA's threads, one of which waits for the link

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.cpu import features, kernels_of_cpu
from flexgen_jax.layers import programs
from flexgen_jax.layers.encoding import encoded
from flexgen_jax.layers.programs import Programs
from flexgen_jax.machine.compute_probe import host_read_rate, timed
from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.families import read_config
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.offload.tiers import Memories, tree_bytes
from flexgen_jax.policy.hardware import HardwareProfile, Rate
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.policy import Workload
from flexgen_jax.policy.shapes import BlockShape, Setting
from flexgen_jax.search.costs import Costs
from flexgen_jax.search.simulate import simulate

RAW: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Six layers with experts of Qwen3-30B-A3B's size."""

DTYPE, BITS = "bfloat16", 4
PROMPT, NEW = 16, 33
ROWS, SHARES = (1, 4, 16), (0.0, 0.5, 0.75, 1.0)

LINK = 1e9
"""Byte/s of the simulated link."""


def expert_weights(config: ModelConfig, seed: int, device: jax.Device) -> dict[str, Any]:
    """Returns random weights of an expert on a device, by path in it."""
    layer, formats = model_spec(config).decoders[0], Formats(DTYPE, weight_bits=BITS)
    rng = np.random.default_rng(seed)
    weights = {
        t.own_path: encoded(
            jnp.asarray(0.02 * rng.standard_normal(t.shape), DTYPE), formats.weight(t)
        )
        for t in layer.expert_tensors[0]
    }
    placed: dict[str, Any] = jax.device_put(weights, device)
    return placed


def computing_rates(config: ModelConfig) -> dict[int, float]:
    """Returns the CPU's rate of computing eight experts, in byte/s of their weights, by the number
    of tokens that choose each expert."""
    spec, formats = model_spec(config), Formats(DTYPE, weight_bits=BITS)
    layer, rates = spec.decoders[0], {}
    of_cpu = Programs(config, formats, kernels_of_cpu())
    top, hidden = layer.experts.top, layer.hidden_size
    device = jax.devices()[0]
    groups = [
        [expert_weights(config, top * group + n, device) for n in range(top)] for group in range(4)
    ]
    nbytes = tree_bytes(groups[0])
    for rows in ROWS:
        # The number of tokens with which each expert gets `rows`.
        tokens = rows * layer.experts.count // top
        add = of_cpu.get(programs.add_experts, layer=layer, tokens=tokens)
        x = jnp.asarray(np.random.default_rng(0).standard_normal((tokens, hidden)), DTYPE)
        choices = np.arange(tokens * top, dtype=np.int32).reshape(tokens, top)
        choices %= layer.experts.count
        share = np.full((tokens, top), 1 / top, np.float32)
        numbers, turn = [np.int32(n) for n in range(top)], count()

        def step() -> Any:
            out = np.zeros((tokens, hidden), np.float32)  # noqa: B023
            return add(groups[next(turn) % 4], x, choices, share, numbers, out)  # noqa: B023

        rates[rows] = nbytes / timed(step, at_least=1.0).seconds
    return rates


class SlowLink:
    """Copies to the device that take as long as a link of some byte/s would."""

    def __init__(self, rate: float) -> None:
        def wait(nbytes: np.ndarray) -> np.ndarray:
            time.sleep(float(nbytes) / rate)
            return np.zeros((), np.int32)

        def copy(tree: Any, nbytes: jax.Array) -> Any:
            zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.int32), nbytes)
            return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)

        self._copy: Callable[..., Any] = jax.jit(copy)

    def put(self, memories: Memories, tree: Any, link: str, content: str, _name: str) -> Any:
        """Takes the place of `Memories._put`."""
        to_device = link == "host_to_device"
        moved = jax.device_put(tree, memories._device_sharding)
        if to_device and content == "weights":
            return self._copy(moved, np.float32(tree_bytes(tree)))
        return jax.device_put(
            moved, memories._device_sharding if to_device else memories._host_sharding
        )

    def measured(self, expert: Any) -> float:
        """Returns the byte/s of copying eight experts in sequence."""
        nbytes = tree_bytes(expert)

        def copies() -> list[Any]:
            return [self._copy(expert, np.float32(nbytes)) for _ in range(8)]

        return 8 * nbytes / timed(copies).seconds


def handing_over_seconds(config: ModelConfig) -> float:
    """Returns the seconds of a token's round trip to the CPU if no expert is computed there."""
    layer, formats = model_spec(config).decoders[0], Formats(DTYPE, weight_bits=BITS)
    device, cpu = jax.devices()
    add = Programs(config, formats, kernels_of_cpu(), cpu).get(
        programs.add_experts, layer=layer, tokens=1
    )
    weights = [expert_weights(config, 0, cpu)] * programs.num_experts(layer)
    top, hidden = layer.experts.top, layer.hidden_size
    nothing = [np.int32(-1)] * programs.num_experts(layer)
    routed = jax.device_put(
        (
            jnp.zeros((1, hidden), DTYPE),
            np.zeros((1, top), np.int32),
            np.zeros((1, top), np.float32),
        ),
        device,
    )

    def step() -> Any:
        given = [np.asarray(x) for x in routed]
        out = np.asarray(add(weights, *given, nothing, np.zeros((1, hidden), np.float32)))
        return jax.device_put(out, device)

    return timed(step).seconds


def run(folder: Path, policy: Policy) -> float:
    """Returns the fewest seconds of a token in some runs."""
    seconds = float("inf")
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    with LLM(folder, dtype=DTYPE, policy=policy, dummy_weights=True, unified=False) as llm:
        for seed in range(4):
            ids = np.random.default_rng(seed).integers(3, 2000, PROMPT).tolist()
            llm.generate(prompt_token_ids=[ids], sampling_params=params)
            seconds = min(seconds, llm.report()["decode_s"] / (NEW - 1))
    return seconds


def predicted_seconds(config: ModelConfig, hw: HardwareProfile, policy: Policy) -> float:
    """Returns the simulator's seconds of a token."""
    costs = Costs(Setting(config, DTYPE, hw.unified, hw.sizes), policy, hw)
    plan = costs.plan(BlockShape.of(policy, Workload(PROMPT, NEW, 1)))
    return simulate(costs, plan).decode_s / (NEW - 1)


def main() -> None:
    config = read_config(RAW)
    read, rates = host_read_rate(), computing_rates(config)
    print(f"{features()}, {os.cpu_count()} cores; a plain read: {read / 1e9:.1f} GB/s")
    for rows, rate in rates.items():
        print(f"experts of {rows} rows: {rate / 1e9:.1f} GB/s, {100 * rate / read:.0f} % of it")
    handed = handing_over_seconds(config)
    print(f"handing over a layer: {1e6 * handed:.0f} us")
    link = SlowLink(LINK)
    linked = link.measured(expert_weights(config, 0, jax.devices()[0]))
    print(f"the link: {linked / 1e9:.2f} GB/s")
    cpu_device = cached_property(lambda memories: jax.devices()[1])
    cpu_device.__set_name__(Memories, "cpu")
    Memories.cpu = cpu_device  # type: ignore[assignment]
    Memories._put = lambda *given: link.put(*given)  # type: ignore[method-assign]
    expert = expert_weights(config, 0, jax.devices()[0])
    elements = model_spec(config).decoders[0].expert_size
    products = Rate(
        tuple((float(n), 2 * n * elements * rate / tree_bytes(expert)) for n, rate in rates.items())
    )
    hw = replace(
        known_machine("rtx3090-24gb"),
        host_to_device=Rate.constant(linked),
        linear=dict.fromkeys((16, 8, 4), products),
        host_linear=dict.fromkeys((16, 8, 4), products),
        host_read=read,
        step_s=0.0,
        split_s=handed,
    )
    shape = {"batch_size": 1, "weight_bits": BITS}
    resident = Policy(**shape)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(RAW))
        steps = config.num_layers + 2
        alone = run(folder, resident) - predicted_seconds(config, hw, resident)
        hw = replace(hw, step_s=max(0.0, alone / steps))
        print(f"a step's fixed time: {1e6 * hw.step_s:.0f} us")
        print("| computed on the CPU | token/s | predicted |")
        print("| --- | --- | --- |")
        for share in SHARES:
            policy = Policy.from_percent(*(7, 93, 100, 0, 100, 0), host_experts=share, **shape)
            seconds, expected = run(folder, policy), predicted_seconds(config, hw, policy)
            print(f"| {100 * share:.0f} % | {1 / seconds:.1f} | {1 / expected:.1f} |")
        best = Costs(Setting(config, DTYPE, False, hw.sizes), policy, hw).host_share()
        print(f"the plan's share: {100 * best:.0f} %")


if __name__ == "__main__":
    main()
