"""Plans for mixtures of experts, with all experts copied, and with some computed by the CPU.

    python scripts/benchmarks/host_experts.py > plans.md
    python scripts/benchmarks/host_experts.py --picture docs/host_experts.png

Prints a table of predicted tokens per second while decoding, by model, machine and number of
sequences, or draws them for gpt-oss-120b. No machine is needed: profiles are those of
`flexgen-jax plan --hardware`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from flexgen_jax.models.shapes import known_shape
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Choices, Plan, Problem
from flexgen_jax.search.search import search
from flexgen_jax.units import significant

GB = 10**9
MODELS = {
    "openai/gpt-oss-120b": None,
    "Qwen/Qwen3-30B-A3B": 4,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 4,
    "deepseek-ai/DeepSeek-V3": 4,
}
"""Models, and the bits of their weights, None for those that they are published in."""

MACHINES = {"rtx4090-24gb": 64 * GB, "rtx3060-12gb": 64 * GB, "h200-141gb": 1000 * GB}
"""Machines, and their host memory in bytes."""

SEQUENCES = (1, 4, 16, 64)
PROMPT, NEW = 128, 129

DRAWN, DRAWN_MACHINE = "openai/gpt-oss-120b", "rtx4090-24gb"
DRAWN_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TICKS = (16, 32, 64, 128)
WAYS = {"all copied": 0.0, "all on the CPU": 1.0, "the plan's share": None}
"""Shares of the experts outside of the device that the CPU computes, by name."""


def best_plan(model: str, machine: str, num_sequences: int, share: float | None) -> Plan | None:
    """Returns the best plan; share: of experts that the CPU computes, None for the best one."""
    config, hw, bits = known_shape(model), known_machine(machine), MODELS[model]
    if bits is not None:
        config = replace(config, published=None)
    elif config.published is not None:
        bits = config.published.bits
    problem = Problem(
        setting=Setting(config, hw.dtype, hw.unified, hw.sizes),
        hw=hw,
        budgets=Budgets(hw.device_memory, MACHINES[machine], hw.disk_space, None),
        workload=Workload(PROMPT, NEW, num_sequences),
        base=Policy(host_experts=share),
        choices=Choices(weight_bits=(bits or 16,)),
    )
    return next(iter(search(problem)), None)


def decoded_per_second(plan: Plan | None) -> float:
    """Returns the tokens per second after the prompts; 0 without a plan."""
    return 0.0 if plan is None else plan.num_sequences * (NEW - 1) / plan.decode_s


def draw(path: Path) -> None:
    """Draws the predicted token/s over the number of sequences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for (name, share), style in zip(WAYS.items(), ("s--", "^:", "o-"), strict=True):
        rates = [
            decoded_per_second(best_plan(DRAWN, DRAWN_MACHINE, count, share))
            for count in DRAWN_SEQUENCES
        ]
        axes.loglog(DRAWN_SEQUENCES, rates, style, label=name, base=2)
    axes.set_xlabel("sequences")
    axes.set_ylabel("predicted token/s, decoding")
    axes.set_yticks(TICKS, [str(tick) for tick in TICKS])
    axes.set_xticks(DRAWN_SEQUENCES, [str(count) for count in DRAWN_SEQUENCES])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw instead of printing")
    path = parser.parse_args().picture
    if path is not None:
        draw(path)
        return
    print("| model | machine | sequences | all copied | the plan's | share on the CPU | times |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    started = time.process_time()
    for model in MODELS:
        for machine in MACHINES:
            for count in SEQUENCES:
                copied = decoded_per_second(best_plan(model, machine, count, 0.0))
                plan = best_plan(model, machine, count, None)
                rate = decoded_per_second(plan)
                share = 0.0 if plan is None else plan.policy.host_experts or 0.0
                times = f"{rate / copied:.2f}" if copied else "-"
                print(
                    f"| {model} | {machine} | {count} | {significant(copied)} | "
                    f"{significant(rate)} | {100 * share:.0f} % | {times} |"
                )
    print(f"{time.process_time() - started:.0f} s of CPU", file=sys.stderr)


if __name__ == "__main__":
    main()
