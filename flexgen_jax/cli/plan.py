"""`flexgen-jax plan`: finds a policy and predicts its performance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexgen_jax.cli.commands import Command
from flexgen_jax.cli.engine_flags import engine_options
from flexgen_jax.cli.flags import model_options, plan_options, policy_options
from flexgen_jax.cli.json_files import check_json, json_option, write_json
from flexgen_jax.cli.plan_text import plan_json, plan_text, staged_json, staged_text
from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.errors import UserError
from flexgen_jax.policy.hardware import Rate
from flexgen_jax.policy.machines import read_profile
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.schedule.stages import divisions
from flexgen_jax.search.candidates import Candidate, candidates, frontier
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Choices, Plan, Problem
from flexgen_jax.search.search import evaluate, search
from flexgen_jax.search.stage_search import ChainPlan, search_stages
from flexgen_jax.units import parse_bytes, scaled, significant

if TYPE_CHECKING:
    from flexgen_jax.models.config import ModelConfig
    from flexgen_jax.policy.hardware import HardwareProfile
    from flexgen_jax.progress import Progress

MIN_HINT_SPEEDUP = 1.2
"""A hint is given if a change makes the predicted throughput at least this many times as high."""

PROMPT_LEN = 512
"""Default number of prompt tokens."""

MUCH = 1000
"""Factor by which a budget is raised to test whether it is the limit."""


@click.command(cls=Command)
@plan_options
@json_option
@model_options
@policy_options
def plan(
    hardware: str | None,
    prompt_len: int | None,
    gen_len: int,
    num_sequences: int | None,
    prefix_len: int,
    num_prefixes: int,
    max_latency: float | None,
    min_throughput: float | None,
    allow_compression: bool,
    allow_sparsity: float | None,
    draft_accepted: float | None,
    latency_curve: Path | None,
    json_file: Path | None,
    **flags: Any,
) -> None:
    """Find the fastest policy for a machine, and predict its performance.

    Flags that set a part of the policy fix it; then only the prediction is made. --stages N plans
    for N equal machines.
    """
    from flexgen_jax.models.loading import shape_of
    from flexgen_jax.progress import Progress

    check_json(json_file)
    check_json(latency_curve, "--latency-curve")
    options = engine_options(flags, Policy().batch_size, hardware=hardware)
    choices = plan_choices(options, allow_compression, allow_sparsity)
    if prefix_len and (num_sequences or 0) < num_prefixes:
        raise click.UsageError(
            "--prefix-len needs --num-sequences, with at least one sequence per prefix"
        )
    profile = None if options.hardware is None else read_profile(options.hardware)
    model = None if options.model is None else str(options.model)
    config = shape_of(model, options.adapters)
    if prompt_len is None:
        prompt_len = max(1, min(PROMPT_LEN, config.max_positions - gen_len - prefix_len))
    workload = Workload(
        prompt_len=prompt_len,
        gen_len=gen_len,
        num_sequences=num_sequences or 0,
        prefix_len=prefix_len,
        num_prefixes=num_prefixes if prefix_len else 1,
    )
    progress = Progress(options.progress)
    problem = make_problem(
        options=options,
        config=config,
        profile=profile,
        workload=workload,
        choices=choices,
        progress=progress,
        draft_accepted=draft_accepted,
    )
    problem = replace(problem, max_latency=max_latency, min_throughput=min_throughput)
    fixed_policy = None
    if not options.is_auto:
        fixed_policy = options.policy_on(problem.setting.unified, config)
    if options.progress:
        click.echo(
            "flexgen-jax: searching for a policy; this may take minutes for large models", err=True
        )
    if options.stages > 1:
        limits = (max_latency, min_throughput, options.write_limit, prefix_len or None)
        refuse_with_stages(fixed_policy, latency_curve, *limits)
        chain = staged_plan(problem, options.stages)
        click.echo(staged_text(problem, chain))
        write_json(json_file, staged_json(problem, chain))
        return
    plans = made_plans(problem, fixed_policy)
    ideas = hints(problem, plans[0].policy) if fixed_policy is None else []
    click.echo(plan_text(problem, plans, ideas))
    if latency_curve is not None:
        name = "the shipped toy" if options.model is None else Path(str(options.model)).name
        click.echo(curve_text(draw_curve(problem, name, latency_curve)))
    write_json(json_file, plan_json(problem, plans, ideas))


def plan_choices(
    options: EngineOptions, allow_compression: bool, allow_sparsity: float | None
) -> Choices:
    """The choices of the search: given values are fixed, flags may allow more."""
    fixed, allowed = options.changes, dict[str, Any]()
    if allow_compression:
        allowed |= {name: (16, 4) for name in ("weight_bits", "cache_bits") if name not in fixed}
    if allow_sparsity and allow_sparsity < 1 and "attention_sparsity" not in fixed:
        allowed["sparsities"] = (1.0, allow_sparsity)
    return replace(Choices.keeping(searched_from(options)), **allowed)


def searched_from(options: EngineOptions) -> Policy:
    """Returns the starting policy of a search, from the flags that fix none."""
    return replace(options, policy="auto").base_policy


def make_problem(
    options: EngineOptions,
    config: ModelConfig,
    profile: HardwareProfile | None,
    workload: Workload,
    choices: Choices,
    progress: Progress,
    draft_accepted: float | None = None,
) -> Problem:
    """Returns the search that the options ask for. profile: of the machine, None for this one;
    draft_accepted: as for `planned_rates`."""
    from flexgen_jax.engine.routing import planned_expert_rates
    from flexgen_jax.models.loading import resolve_dtype

    config.check_lengths(workload.prefix_len + workload.prompt_len, workload.gen_len)
    if config.published is not None and options.weight_bits is None:
        choices = replace(choices, weight_bits=(config.published.bits,))
    device, host, disk = options.budgets
    if profile is None:
        from flexgen_jax.machine.profiles import this_machine  # loads JAX

        folder = None if options.offload_dir is None else Path(options.offload_dir)
        resolved_dtype, profile, budgets = this_machine(
            config, options.dtype, folder, options.budgets, progress
        )
    else:
        resolved_dtype = resolve_dtype(options.dtype, config, profile.unified)
        shared = profile.host_memory if profile.unified else None
        budgets = Budgets(
            profile.device_memory if device is None else device,
            profile.host_memory if host is None else host,
            profile.disk_space if disk is None else disk,
            shared,
        )
        if (resolved_dtype == "float32") != (profile.dtype == "float32"):
            raise UserError(
                f"{options.hardware} was profiled in {profile.dtype}; set --dtype {profile.dtype}"
            )
    experts = planned_expert_rates(options.model, config, resolved_dtype)
    setting = Setting(config, resolved_dtype, profile.unified, profile.sizes, experts=experts)
    if options.draft is not None:
        from flexgen_jax.engine.drafting import planned_rates  # loads JAX

        rates = planned_rates(options.draft, setting, profile, draft_accepted)
        setting = replace(setting, drafts=rates)
    return Problem(
        setting=setting,
        hw=profile,
        budgets=budgets,
        workload=workload,
        base=searched_from(options),
        choices=choices,
        write_limit=parse_bytes(options.write_limit),
    )


def made_plans(problem: Problem, policy: Policy | None) -> list[Plan]:
    """Returns the plans, the chosen one first; raises `UserError` if there is none."""
    if policy is not None:
        missing = problem.budgets.shortfalls(problem.peak(policy))
        if missing:
            raise UserError(f"the policy does not fit: {missing[0]}")
        plan = evaluate(problem, policy)
        excess = problem.excess_writes(plan)
        if excess is not None:
            raise UserError(excess)
        return [plan]
    plans = search(problem)
    if plans:
        return plans
    free = replace(problem, max_latency=None, min_throughput=None, write_limit=None)
    anything = search(free)
    if not anything:
        config = problem.setting.config
        raise UserError(
            f"{config.num_layers} layers of hidden size {config.hidden_size} do not fit "
            f"this hardware in any way; {_what_would_fit(problem)}"
        )
    best = anything[0]
    raise UserError(
        "no policy meets these limits; without them the best one reaches "
        f"{significant(best.throughput)} token/s in batch groups of {best.latency_s:.0f} s, and "
        f"writes {scaled(best.written_a_day)}B a day; "
        "relax --max-latency, --min-throughput or --write-limit"
    )


def _what_would_fit(problem: Problem) -> str:
    """Returns which larger budget, or fewer bits, would have a plan."""
    budgets, suggestions = problem.budgets, list[str]()
    flags = {"device": "--device-memory", "host": "--host-memory", "disk": "--disk-space"}
    for tier, flag in flags.items():
        limit = getattr(budgets, tier)
        if limit is not None:
            raised = replace(budgets, **{tier: MUCH * max(limit, 1 << 30)}, shared=None)
            if candidates(replace(problem, budgets=raised)):
                suggestions.append(
                    f"allow more {'disk' if tier == 'disk' else f'{tier} memory'} ({flag})"
                )
    compressed = _compressed(problem)
    if compressed is not None and candidates(compressed):
        suggestions.append("4 bits with --allow-compression")
    return ", or ".join(suggestions) or "it needs more device memory, host memory and disk together"


def refuse_with_stages(*options: object) -> None:
    """Raises `UserError` for options that a plan of stages does not support."""
    if any(one is not None for one in options):
        raise UserError(
            "--stages cannot be combined with a policy, limits, --prefix-len or --latency-curve"
        )


def staged_plan(problem: Problem, stages: int) -> ChainPlan:
    """Returns the best plan for pipeline stages on equal machines."""
    if stages > problem.setting.config.num_layers:
        raise UserError(
            f"--stages {stages} is more than the model's {problem.setting.config.num_layers} layers"
        )
    spec = problem.costs(problem.base).spec
    chain = search_stages(problem, divisions(spec, stages))
    if chain is None:
        raise UserError(f"no policy fits {stages} stages; allow more disk, or use --weight-bits 4")
    return chain


def hints(problem: Problem, policy: Policy) -> list[dict[str, Any]]:
    """Returns changes of hardware or flags with a large predicted speedup, and the speedup. Batch
    sizes stay near those of the chosen policy unless there are more sequences."""
    base = candidates(problem, centre=policy)
    if not base:
        return []
    hw, budgets = problem.hw, problem.budgets

    def twice(limit: int | None) -> int | None:
        return None if limit is None else 2 * limit

    faster = Rate(tuple((size, 2 * rate) for size, rate in hw.disk_read.points))
    ideas: list[tuple[str, Problem]] = []
    compressed = _compressed(problem)
    if compressed is not None:
        ideas.append(("--allow-compression (4 bits, which costs some quality)", compressed))
    if not problem.setting.unified:
        raised = replace(budgets, device=twice(budgets.device))
        ideas.append(("twice the device memory", replace(problem, budgets=raised)))
    raised = replace(budgets, host=twice(budgets.host), shared=twice(budgets.shared))
    ideas.append(("twice the host memory", replace(problem, budgets=raised)))
    if any(base[0].solution.fractions[name] > 0.01 for name in ("wd", "cd")):
        quick = replace(hw, disk_read=faster)
        ideas.append(("a disk that reads twice as fast", replace(problem, hw=quick)))
    if problem.workload.num_sequences:
        endless = replace(problem.workload, num_sequences=0)
        ideas.append(("more sequences in one run", replace(problem, workload=endless)))
    worth: list[dict[str, Any]] = []
    for idea, changed in ideas:
        has_more = changed.workload != problem.workload
        best = candidates(changed, centre=None if has_more else policy)
        times = best[0].throughput / base[0].throughput if best else 0.0
        if times >= MIN_HINT_SPEEDUP:
            worth.append({"change": idea, "times": round(times, 2)})
    return worth


def _compressed(problem: Problem) -> Problem | None:
    """Returns the problem with 4 bits allowed for weights and cache; None if the bits are chosen
    already."""
    choices = problem.choices
    if (choices.weight_bits, choices.cache_bits) != ((16,), (16,)):
        return None
    return replace(problem, choices=replace(choices, weight_bits=(16, 4), cache_bits=(16, 4)))


def curve_text(points: Sequence[Candidate]) -> str:
    """Formats the latency-throughput frontier as a table."""
    lines = [f"{'block s':>10} {'token/s':>9} {'sequences':>9}  policy"]
    for point in points:
        policy = point.policy
        shape = f"{policy.batch_size} x {policy.num_batches}"
        bits = f"{policy.weight_bits}/{policy.cache_bits} bits"
        bits += "" if policy.matmul_bits == 16 else f", products of {policy.matmul_bits}"
        shares = " ".join(f"{100 * point.solution.fractions[n]:.0f}" for n in _SIX)
        speed = significant(point.throughput)
        lines.append(
            f"{point.solution.total_s:10.1f} {speed:>9} {point.sequences:9d}  "
            f"{shape}, {shares}, {bits}, attention {policy.attention}"
        )
    return "\n".join(lines)


_SIX = ("wg", "wc", "cg", "cc", "hg", "hc")


def draw_curve(problem: Problem, model: str, path: Path) -> list[Candidate]:
    """Plots the throughput-latency frontier (the paper's figure 1) with and without compression.
    Returns its points for the given flags."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--latency-curve draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter, NullFormatter

    requested = frontier(problem)
    if not requested:
        raise UserError("no policy fits this hardware, so there is no curve to plot")
    curves = {"as asked": requested}
    compressed = _compressed(problem)
    if compressed is not None:
        curves["4 bits allowed"] = frontier(compressed)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, points in curves.items():
        x, y = [p.solution.total_s for p in points], [p.throughput for p in points]
        axes.plot(x, y, marker="o", label=label)
        axes.annotate(
            f"{points[-1].sequences} sequences",
            (x[-1], y[-1]),
            fontsize=8,
            ha="right",
            va="bottom",
        )
    axes.set(xscale="log", yscale="log", xlabel="latency of a block, s", ylabel="token/s")
    work = problem.workload
    axes.xaxis.set_major_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.4)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(0.1)
    axes.set_title(
        f"{model} on {problem.hw.name}, {work.prompt_len} + {work.gen_len} tokens, predicted",
        fontsize=10,
        wrap=True,
    )
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write --latency-curve {path}: {error}") from None
    pyplot.close(figure)
    return requested
