"""Predicts token/s on GPUs that are not there, from the programs that XLA compiles for them.

    gpu/bin/python scripts/benchmarks/gpu_predictions.py

The rates of products and of attention to the KV cache are those of the compiled programs: a kernel
takes the time of the bytes that it reads and writes, and a fixed one. Copies, the disk and the CPU
are those of the machine's profile. Each plan is the best one by the profile, and is predicted with
its rates and with those of the programs. The environment is that of `scripts/gpu_compile.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu_compile import TAIL, weigh

from flexgen_jax.layers import programs
from flexgen_jax.layers.programs.table import Traceable
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.hardware import HardwareProfile, Rate
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Choices, Problem
from flexgen_jax.search.search import evaluate, search
from gpu_targets import CARDS, Card

READ_SHARE, KERNEL_S = 0.62, 1.4e-6
"""The share of a card's bandwidth that products of one row reach, and the fixed seconds of a
kernel: on an H200, 403 MB of a layer of OPT-6.7B took 136 us, and its 18 small kernels 25 us."""

ROWS = (1, 8, 64)
CONTEXT = 544
DTYPE = "float16"
MACHINES = {"t4": "t4-16gb", "h100": "h100-80gb"}
RESIDENT = Policy.from_percent(100, 0, 100, 0, 100, 0, batch_size=1)


@dataclass(frozen=True)
class Asked:
    """A model on a card, with the bits of its weights, and a policy (None: the best)."""

    card: str
    model: str
    bits: int
    policy: Policy | None = None


def asked_of(cards: Sequence[str], models: Sequence[str]) -> Iterator[Asked]:
    """Yields a resident OPT-6.7B with one sequence, and the models under the plans for them."""
    for card in cards:
        for bits in (16, 4):
            yield Asked(card, "facebook/opt-6.7b", bits, RESIDENT)
        for model in models:
            for bits in (16, 4):
                yield Asked(card, model, bits)


def device_s(card: Card, model: Traceable, kind: Any, shape: dict[str, Any]) -> float:
    """Returns the seconds that a program takes by the bytes that it moves."""
    _, kernels, _, moved, _ = weigh(card, model, kind, shape)
    return float(moved / (READ_SHARE * card.bandwidth) + kernels * KERNEL_S)


def weighed_profile(asked: Asked) -> HardwareProfile:
    """Returns the profile of a machine with the rates of a model's compiled programs."""
    hw, card = known_machine(MACHINES[asked.card]), CARDS[asked.card]
    model = Traceable(
        known_shape(asked.model), Formats(DTYPE, weight_bits=asked.bits), card.kernels
    )
    layer = model.spec.decoders[0]
    products: dict[int, float] = {}
    for rows in ROWS:
        at = {"layer": layer, "rows": rows}
        products[rows] = device_s(card, model, programs.project, at)
        products[rows] += device_s(card, model, programs.finish, {**at, "places": 1})
    full = hw.linear[16]
    rates = [(rows, min(layer.flops(rows) / s, full.at(1e4))) for rows, s in products.items()]
    prompts = [(rows, full.at(rows)) for rows in (512.0, 4096.0)]
    rows = ROWS[1]
    decode = {"layer": layer, "rows": rows, "blocks": (CONTEXT,), "tail": TAIL, "appends": True}
    attention_s = device_s(card, model, programs.decode, decode) - products[rows]
    elements = rows * CONTEXT * layer.row_size
    attended = Rate.constant(elements / max(attention_s, 1e-6))
    return replace(
        hw,
        linear=hw.linear | {asked.bits: Rate(tuple(rates + prompts))},
        device_attention=hw.device_attention | {16: attended},
    )


def problem(asked: Asked, hw: HardwareProfile, prompt_len: int, gen_len: int) -> Problem:
    """Returns the search problem of a model on a machine."""
    sequences = 1 if asked.policy else 0
    return Problem(
        setting=Setting(known_shape(asked.model), DTYPE, False, hw.sizes),
        hw=hw,
        budgets=Budgets(hw.device_memory, hw.host_memory, hw.disk_space),
        workload=Workload(prompt_len, gen_len, sequences),
        choices=Choices((asked.bits,), (16,)),
    )


def row_of(asked: Asked, prompt_len: int, gen_len: int) -> str:
    """Returns the prediction as a table row."""
    task = problem(asked, known_machine(MACHINES[asked.card]), prompt_len, gen_len)
    policy = asked.policy
    if policy is None:
        plans = search(task)
        if not plans:
            return f"| {asked.model} | {asked.card} | {asked.bits} | does not fit | | | |"
        policy = plans[0].policy
    policy = replace(policy, weight_bits=asked.bits)
    by_profile = evaluate(task, policy)
    by_programs = evaluate(replace(task, hw=weighed_profile(asked)), policy)
    homes = (policy.weights.device, policy.weights.host, policy.weights.disk)
    weights = " ".join(f"{100 * share:.0f}" for share in homes)
    return (
        f"| {asked.model} | {asked.card} | {asked.bits} | {policy.batch_size} x "
        f"{policy.num_batches} | {weights} | {by_profile.throughput:.3g} "
        f"| {by_programs.throughput:.3g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument(
        "--models",
        nargs="*",
        default=["facebook/opt-6.7b", "facebook/opt-30b", "facebook/opt-175b"],
    )
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--gen-len", type=int, default=32)
    args = parser.parse_args()
    print("| model | card | bits | batches | weights on device, host, disk | profile | programs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for asked in asked_of(args.cards, args.models):
        print(row_of(asked, args.prompt_len, args.gen_len), flush=True)


if __name__ == "__main__":
    main()
