"""The paper's linear program (section 4.3): the best fractions for given batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from flexgen_jax.models.config import ModelConfig
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.policy import TIERS, Ahead, Tier, Workload, generated_blocks
from flexgen_jax.schedule.cache_blocks import PENDING_WRITES
from flexgen_jax.search.cost_model import FRACTIONS, BlockTerms, LinearTerm
from flexgen_jax.search.costs import Costs
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.memory import workspace_bytes

PREFERENCE = 1e-6
"""Penalty in the objective for a fraction, per tier below the device. It decides between solutions
that take equally long."""


@dataclass(frozen=True)
class Solution:
    """The nine fractions, and the seconds that a block of batches takes with them."""

    fractions: dict[str, float]
    total_s: float


def memory_terms(costs: Costs, workload: Workload) -> dict[Tier, LinearTerm]:
    """Returns the peak bytes of each tier, linear in the fractions.

    They are appendix A.3's home and working memory. `memory.peak_bytes` computes a policy's exact
    peaks, with whole tensors and blocks.
    """
    policy, unified = costs.policy, costs.setting.unified
    layers = len(costs.spec.decoders)
    rows, batches = policy.batch_size, policy.num_batches
    ahead = Ahead.of(policy)
    prompt, cached = workload.prompt_len, workload.prompt_len + max(workload.gen_len - 1, 0)
    weights, small_weights = weight_bytes(costs.setting.config, costs.formats)
    # Of the largest layers, if not of all: those with experts among dense ones.
    layer = max(costs.layer_bytes(layer) for layer, _ in costs.spec.decoder_kinds)
    ends = costs.end_bytes()
    chunk, *other_chunks = sorted(costs.chunks(prompt, workload.scores_prompts), reverse=True)
    kv_chunk = costs.mean(lambda layer: costs.kv_bytes(layer, rows, chunk))
    kv_layer = 0.0
    if workload.gen_len > 1:
        kv_layer = costs.mean(lambda layer: costs.kv_bytes(layer, rows, cached))
        kv_layer += costs.mean(lambda layer: costs.state_bytes(layer, rows))
    kv_prefix = costs.mean(lambda layer: costs.kv_bytes(layer, 1, workload.prefix_len))
    cache = (kv_layer * batches + kv_prefix * workload.num_prefixes) * layers
    hidden = costs.hidden_bytes(rows, chunk)
    home = {
        "g": LinearTerm({"wg": weights, "cg": cache, "hg": hidden * batches}, small_weights),
        "c": LinearTerm({"wc": weights, "cc": cache, "hc": hidden * batches}),
        "d": LinearTerm({"wd": weights, "cd": cache, "hd": hidden * batches}),
    }
    opened = generated_blocks(workload.gen_len, policy.kv_block_tokens)
    tokens = max(opened, default=0)
    tail = costs.mean(lambda layer: costs.open_kv_bytes(layer, rows, tokens)) * batches * layers
    work = workspace_bytes(
        setting=costs.setting,
        formats=costs.formats,
        rows=rows,
        tokens=max(chunk, policy.pass_tokens),
        head=workload.head,
        unpacks=costs.unpacks,
        is_chunked=bool(other_chunks),
        prefix=workload.prefix_len,
        pass_tokens=policy.pass_tokens,
    )
    if policy.draft_tokens:
        tokens = rows * batches * (workload.prefix_len + prompt + workload.gen_len)
        work += costs.setting.drafts.held(tokens)
    device = home["g"] + LinearTerm({}, work)
    host = home["c"] + LinearTerm(
        {
            "wd": (ahead.weight_reads + 1) * layer + costs.end_bytes_held(),
            "cd": max(
                ahead.cache_buffers * kv_layer,
                (PENDING_WRITES + 1) * kv_chunk,
            )
            + tail,
            "hd": (ahead.hidden_reads + PENDING_WRITES + 2) * hidden,
        }
    )
    states = batches * costs.hidden_bytes(rows, policy.pass_tokens)
    if costs.keeps_states(rows):
        device = device + LinearTerm({"hc": states, "hd": states})
    else:
        host = host + LinearTerm({"hd": states})
    if policy.cache_bits < 16:
        device, host = device + LinearTerm({"cg": tail}), host + LinearTerm({"cc": tail})
    if not unified:
        moved_share = 1.0 if other_chunks else policy.moved_share
        copies = (ahead.cache_copies + 1) * moved_share * kv_layer
        window = (ahead.weight_copies + 1) * max(layer, ends - layer)
        device = device + LinearTerm(
            dict.fromkeys(("wc", "wd"), window)
            | dict.fromkeys(("cc", "cd"), copies)
            | dict.fromkeys(("hc", "hd"), (ahead.hidden_reads + 1) * hidden)
        )
    return {"device": device, "host": host, "disk": home["d"]}


@lru_cache(maxsize=16)  # all policies of a search share them, and there are thousands of tensors
def weight_bytes(config: ModelConfig, formats: Formats) -> tuple[int, int]:
    """Returns the bytes of the tensors that a policy places, and of the small ones."""
    tensors = model_spec(config).tensors.values()
    small = sum(formats.weight(t).nbytes for t in tensors if t.is_small)
    return sum(formats.weight(t).nbytes for t in tensors) - small, small


def solve(
    terms: BlockTerms,
    memory: Mapping[Tier, LinearTerm],
    budgets: Budgets,
    max_latency: float | None = None,
    max_written: float | None = None,
) -> Solution | None:
    """Returns the fractions with the least total time within the budgets; None if nothing fits.

    Variables: the nine fractions, T_pre and T_gen. max_latency: seconds of a whole block;
    max_written: bytes that it may write to the disk.
    """
    from scipy.optimize import linprog

    names = (*FRACTIONS, "T_pre", "T_gen")
    rows: list[list[float]] = []
    bounds: list[float] = []

    def at_most(term: LinearTerm, limit: float, extra: Mapping[str, float], scale: float) -> None:
        factors = {**term.factors, **extra}
        rows.append([factors.get(name, 0.0) / scale for name in names])
        bounds.append((limit - term.constant) / scale)

    for time, resources in (("T_pre", terms.prefill), ("T_gen", terms.decode)):
        for term in resources.values():
            at_most(term, 0.0, {time: -1.0}, 1.0)
    for tier in TIERS:
        limit = budgets.allowed(tier)
        if limit is not None:
            at_most(memory[tier], limit, {}, 1e9)
    if budgets.shared is not None:
        at_most(memory["device"] + memory["host"], budgets.shared, {}, 1e9)
    if max_written is not None:
        at_most(terms.written, max_written, {}, 1e9)
    steps = terms.layers * terms.passes
    if max_latency is not None:
        whole = {"T_pre": float(terms.layers), "T_gen": float(steps)}
        at_most(LinearTerm({}, terms.ends), max_latency, whole, 1.0)
    least = [max(t.constant for t in p.values()) for p in (terms.prefill, terms.decode)]
    scale = max(terms.total_s(*least), 1e-9)
    slower = {"g": 0.0, "c": 1.0, "d": 2.0}
    objective = [PREFERENCE * slower[name[1]] for name in FRACTIONS]
    objective += [terms.layers / scale, steps / scale]
    optimum = linprog(
        objective,
        A_ub=rows,
        b_ub=bounds,
        A_eq=[[float(name[0] == kind) for name in names] for kind in "wch"],
        b_eq=[1.0, 1.0, 1.0],
        bounds=[(0, 1)] * 9 + [(0, None)] * 2,
        method="highs",
    )
    if optimum.status != 0:
        return None
    fractions = {
        name: min(max(float(x), 0.0), 1.0) for name, x in zip(FRACTIONS, optimum.x, strict=False)
    }
    return Solution(fractions, sum(terms.estimate(fractions)))
