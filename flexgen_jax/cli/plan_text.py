"""Plans as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flexgen_jax.policy.placement import stays_on_device
from flexgen_jax.policy.policy import TIERS, Policy, Workload
from flexgen_jax.search.fit import human
from flexgen_jax.search.problem import Plan, Problem
from flexgen_jax.search.stage_search import ChainPlan
from flexgen_jax.units import scaled, significant

BAR = 30


def staged_text(problem: Problem, plan: ChainPlan) -> str:
    """Formats the plan of stages for people."""
    work, shape = problem.workload, plan.shape
    count = len(plan.stages)
    lines = [
        f"{plan.tokens // work.gen_len} x ({work.prompt_len} + {work.gen_len}) tokens in "
        f"{problem.setting.dtype} on {count} of {problem.hw.name}, {shape.groups} groups of "
        f"{shape.group_rows}",
        f"predicted: {significant(plan.throughput)} token/s, "
        f"{significant(plan.decode_throughput)} while decoding "
        f"(prefill {plan.prefill_s:.1f} s, decode {plan.decode_s:.1f} s)",
    ]
    for number, (stage, layer_range) in enumerate(zip(plan.stages, plan.layers, strict=True)):
        lines.append(
            f"stage {number}, layers {layer_range.start} to {layer_range.stop - 1}: "
            f"{stage.prefill_s:.3g} s for "
            f"a group's prompts, {stage.token_s:.3g} s for a token: "
            f"{flags_of(stage.policy, problem)}"
        )
        lines += [
            _bar(tier, stage.peak_bytes[tier], problem.budgets.allowed(tier)) for tier in TIERS
        ]
    return "\n".join(lines)


def staged_json(problem: Problem, plan: ChainPlan) -> dict[str, Any]:
    """Returns the content of `plan --stages N --json`; sizes are in bytes, times in seconds."""
    return {
        "hardware": problem.hw.name,
        "dtype": problem.setting.dtype,
        "prompt_len": problem.workload.prompt_len,
        "gen_len": problem.workload.gen_len,
        "num_sequences": plan.tokens // problem.workload.gen_len,
        "predicted": {
            "prefill_s": plan.prefill_s,
            "decode_s": plan.decode_s,
            "total_s": plan.total_s,
            "generation_throughput": plan.throughput,
            "decode_throughput": plan.decode_throughput,
        },
        "stages": [
            {"layers": [layer_range.start, layer_range.stop], **asdict(stage)}
            for stage, layer_range in zip(plan.stages, plan.layers, strict=True)
        ],
    }


def plan_json(
    problem: Problem, plans: Sequence[Plan], ideas: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the content of `plan --json`; sizes are in bytes, times in seconds."""
    first = plans[0]
    return {
        "hardware": problem.hw.name,
        "dtype": problem.setting.dtype,
        "prompt_len": problem.workload.prompt_len,
        "gen_len": problem.workload.gen_len,
        "prefix_len": problem.workload.prefix_len,
        "num_prefixes": problem.workload.num_prefixes,
        "num_sequences": first.num_sequences,
        "block_sequences": first.block_sequences,
        **_described(first),
        "alternatives": [_described(plan) for plan in plans[1:]],
        "hints": ideas,
    }


def _described(plan: Plan) -> dict[str, Any]:
    return {
        "policy": asdict(plan.policy),
        "predicted": {
            "prefill_s": plan.prefill_s,
            "decode_s": plan.decode_s,
            "total_s": plan.total_s,
            "block_s": plan.latency_s,
            "generation_throughput": plan.throughput,
        },
        "binding": plan.binding,
        "busy_s": plan.busy_s,
        "moved_bytes": plan.moved_bytes,
        "peak_bytes": plan.peak_bytes,
        "written_bytes_a_day": plan.written_a_day,
    }


def flags_of(policy: Policy, problem: Problem) -> str:
    """Formats a policy as command-line flags for the problem's model."""
    percent = " ".join(f"{x:g}" for x in policy.percent)
    flags = (
        f"--percent {percent} --batch-size {policy.batch_size} --num-batches {policy.num_batches}"
    )
    flags += f" --attention {policy.attention}" if policy.cache.device < 1 else ""
    default = Policy()
    names = ("weight_bits", "weight_format", "cache_bits", "matmul_bits", "schedule")
    for name in (*names, "attention_sparsity"):
        is_own = name == "weight_bits" and problem.setting.config.published is not None
        if getattr(policy, name) != getattr(default, name) and not is_own:
            flags += f" --{name.replace('_', '-')} {getattr(policy, name)}"
    if policy.draft_tokens:
        flags += f" --draft {problem.setting.drafts.name} --draft-tokens {policy.draft_tokens}"
    if policy.host_experts:
        flags += f" --host-experts {100 * policy.host_experts:g}"
    if policy.expert_cache_bytes:
        flags += f" --expert-cache {policy.expert_cache_bytes}"
    flags += "" if policy.copies_ahead else " --no-copy-ahead"
    return flags + ("" if policy.overlap else " --no-overlap")


def _rate(plan: Plan, resource: str) -> str:
    """Formats the byte/s of a transfer while it is busy, if the resource is one."""
    nbytes, seconds = plan.moved_bytes.get(resource), plan.busy_s[resource]
    return f" at {scaled(nbytes / seconds)}B/s" if nbytes and seconds else ""


def _shared(work: Workload) -> str:
    """Says what prompts share, if anything."""
    if not work.prefix_len:
        return ""
    return f" after {work.num_prefixes} x {work.prefix_len} shared ones"


def plan_text(problem: Problem, plans: Sequence[Plan], ideas: list[dict[str, Any]]) -> str:
    """Formats the plan for people."""
    plan, work = plans[0], problem.workload
    total = max(plan.total_s, 1e-12)
    busy = {
        name: seconds / total for name, seconds in plan.busy_s.items() if seconds > 0.005 * total
    }
    blocks = -(-plan.num_sequences // plan.block_sequences)
    lines = [
        f"{plan.num_sequences} x ({work.prompt_len} + {work.gen_len}) tokens{_shared(work)} in "
        f"{problem.setting.dtype} on {problem.hw.name}, {blocks} "
        f"batch group{'s' if blocks > 1 else ''} of {plan.block_sequences} sequences",
        f"policy: {flags_of(plan.policy, problem)}",
        f"that is: {plan.policy.in_words}",
        f"predicted: {significant(plan.throughput)} token/s (prefill {plan.prefill_s:.1f} s, "
        f"decode {plan.decode_s:.1f} s, total {plan.total_s:.1f} s)",
        f"binding: {plan.binding.replace('_', ' ')}; busy: "
        + ", ".join(
            f"{name.replace('_', ' ')} {100 * share:.0f} %{_rate(plan, name)}"
            for name, share in busy.items()
        ),
    ]
    if plan.policy.draft_tokens:
        tokens_per_pass = problem.costs(plan.policy).tokens_a_pass
        lines.append(
            f"guesses: {plan.policy.draft_tokens} for a pass, which then finds "
            f"{tokens_per_pass:.2f} tokens "
            f"of a text if {100 * problem.setting.drafts.accepted:.0f} % are right"
        )
    elif problem.setting.drafts.name:
        lines.append("guesses: none, since a pass with them takes longer than they save")
    if plan.written:
        lines.append(f"written to the disk: {scaled(plan.written_a_day)}B a day of such work")
    states = problem.costs(plan.policy).hidden_bytes(plan.policy.batch_size, 1)
    if plan.policy.activations.device < 1 and stays_on_device(states):
        lines.append(
            f"hidden states of single tokens stay on the device, {human(states)} for each batch"
        )
    for tier in TIERS:
        lines.append(_bar(tier, plan.peak_bytes[tier], problem.budgets.allowed(tier)))
    if problem.budgets.shared is not None:
        together = plan.peak_bytes["device"] + plan.peak_bytes["host"]
        lines.append(_bar("RAM", together, problem.budgets.shared))
    for alternative in plans[1:]:
        change = 100 * (alternative.throughput / plan.throughput - 1)
        lines.append(
            f"next best: {significant(alternative.throughput)} token/s "
            f"({change:+.1f} %{_why_not(plan, alternative)}): "
            f"{flags_of(alternative.policy, problem)}"
        )
    lines += [f"{idea['times']:.1f} times as fast with {idea['change']}" for idea in ideas]
    return "\n".join(lines)


def _why_not(best: Plan, other: Plan) -> str:
    """Returns why a plan that is predicted to be faster is not the chosen one."""
    if other.throughput <= best.throughput:
        return ""
    if other.block_sequences > best.block_sequences:
        more = other.latency_s / max(best.latency_s, 1e-9)
        return f", within the prediction's error, with results after {more:.1f} times the time"
    return ", but slower where the disk is not as fast as usual"


def _bar(name: str, nbytes: int, limit: int | None) -> str:
    if limit is None:
        return f"{name:>7} {nbytes / 1e9:8.2f} GB"
    filled = min(BAR, round(BAR * nbytes / max(limit, 1)))
    filled = max(filled, 1) if nbytes else 0
    bar = "#" * filled + "." * (BAR - filled)
    return f"{name:>7} [{bar}] {nbytes / 1e9:.2f} of {limit / 1e9:.2f} GB"
