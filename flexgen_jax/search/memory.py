"""Peak bytes of every tier from a dry run before allocation, and the workspace of computations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import mul

from flexgen_jax.models.config import DTYPES
from flexgen_jax.models.spec import LayerSpec, ModelSpec
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.policy.hardware import KernelSizes
from flexgen_jax.policy.parts import Layout
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import GREEDY, SAMPLE_AND_READ, SCORE, TIERS, HeadUse, Tier
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.schedule.admission import block_of
from flexgen_jax.schedule.arrivals import Again, Alone, LastOneLate, Planned
from flexgen_jax.schedule.backend import Inputs, Part
from flexgen_jax.schedule.cache_blocks import PENDING_WRITES
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.loop import BlockLoop
from flexgen_jax.schedule.passes import Begun, Handle
from flexgen_jax.schedule.running import LayerState, PromptPart, ReplacedPart, Running, SealedPart
from flexgen_jax.schedule.shrinking import ENTRY_FRACTION, rows_beside
from flexgen_jax.schedule.waves import Step

SCRATCH = 8 << 20
"""Bytes that the library of a GPU's products has for a product's partial sums."""

MAX_UNPACKED_BYTES = 16 << 20
"""Bytes of small kernels that may be unpacked at the same time."""


class Idle:
    """A backend that moves and computes nothing, for the peaks of a run.

    Copies begin as early as they may, and writes wait for the disk as long as they may: anything
    that depends on timing uses its maximum memory.
    """

    def __init__(self, pass_tokens: int = 1) -> None:
        """pass_tokens: those that a pass after the prompt computes."""
        self._begun = Begun(computed=pass_tokens)

    def begin(self, step: Step, times: int) -> Begun:
        return self._begun

    def allocate(self, layout: Layout) -> Handle:
        return None

    def fetch(self, part: Part, buffers: Sequence[Handle], like: Handle = None) -> Handle:
        return "load"

    def copy(self, load: Handle) -> None:
        pass

    def wait_read(self, load: Handle) -> None:
        pass

    def detach(self, load: Handle) -> None:
        pass

    def drop(self, load: Handle, is_used: bool) -> None:
        pass

    def compute(self, step: Step, inputs: Inputs) -> Handle:
        experts = inputs.experts
        if experts is not None:  # the guesses are all wrong
            most = experts.most
            experts.load([*experts.away][:most], [*experts.guessable][-most:])

    def finish(self, step: Step, computed: Handle) -> int | None:
        return None

    def shrink(self, step: Step, rows: int) -> None:
        pass

    def shrink_state(self, state: LayerState, cache: Handle, replaced: Handle) -> None:
        pass

    def keep(self, made: ReplacedPart | PromptPart | LayerState, computed: Handle) -> None:
        pass

    def open_block(self, state: LayerState, buffer: Handle | None) -> None:
        pass

    def quantize(self, state: LayerState, block: int) -> None:
        pass

    def write(self, part: ReplacedPart | SealedPart) -> Handle:
        return "write"

    def is_done(self, handle: Handle) -> bool:
        return bool(handle == "load")

    def wait(self, write: Handle) -> None:
        pass


def peak_bytes(
    plan: BlockPlan, is_too_much: Callable[[dict[Tier, int]], object] = lambda peaks: False
) -> dict[Tier, int]:
    """Returns the most bytes that a plan needs in each tier, from a dry run of the tokens at which
    they can occur.

    They are exact except for two upper bounds: data waiting for disk writes, which depends on
    timing, and the order of blocks going to tiers while one token seals them all, see
    `_telling_tokens`.

    is_too_much: whether peaks that the plan has at least make an exact answer needless; they are
    returned then.
    """
    cache_bytes = plan.expert_cache_bytes
    if cache_bytes:  # as full as it may be, and without a hit
        plan = replace(plan, policy=replace(plan.policy, expert_cache_bytes=0))
    prefixes = [running for running in block_of(plan) if running.is_prefix]
    batches = [running for running in block_of(plan) if not running.is_prefix]
    tokens, allowed = _telling_tokens(plan, batches)
    waits = plan.policy.order.waits
    for tier, nbytes in _rounding(plan, batches[0]).items() if not waits else ():
        allowed[tier] = allowed.get(tier, 0) + nbytes
    for tier, nbytes in _rounding_of(plan, prefixes).items():
        allowed[tier] = allowed.get(tier, 0) + nbytes
    peaks: dict[Tier, int] = dict.fromkeys(TIERS, 0)
    for arrivals in _orders_of_arrival(plan, tokens):
        run = dry_run(plan, dict.fromkeys(tokens, 1), arrivals)
        run["device"] += cache_bytes
        peaks = {tier: max(peaks[tier], run[tier] + allowed.get(tier, 0)) for tier in TIERS}
        if is_too_much(peaks):
            break
    return peaks


def _orders_of_arrival(plan: BlockPlan, tokens: Sequence[int]) -> Iterator[Planned]:
    """Yields the admissions of batches that need the most memory."""
    # Embedding and head are read from disk once, and then stay in buffers.
    yield Again(plan, tokens) if plan.policy.weights.disk else Planned(plan, tokens)
    if plan.policy.order.waits:
        return
    # Its last chunk coincides with the others' second to last token, when they hold most.
    late = max(0, len(tokens) - 2)
    for rows in _late_rows(plan):
        yield LastOneLate(replace(plan, shape=plan.shape.with_last(rows)), tokens, late)
    if len(plan.shape.batch_sizes) == 1:
        return
    # Where one batch begins while others go on, buffers for prompts and for reads add up.
    yield LastOneLate(plan, tokens, late)
    # Where the others have left before, no step of theirs is between its own: more of what its
    # chunks need is copied ahead.
    yield Alone(plan)


def _late_rows(plan: BlockPlan) -> set[int]:
    """Returns numbers of rows that take more memory than whole batches do if they enter late, where
    rows of other batches have left.

    Memory is linear in the number of rows, so checking maximum and minimum is enough. The most are
    of one batch, which the plan itself has where it has several. The minimum needs more only if
    prompts load all experts while the other rows, which hold most, load few.
    """
    sizes, policy = plan.shape.batch_sizes, plan.policy
    rows, row_counts = sum(sizes), set[int]()
    if len(sizes) == 1 and rows > 1:
        row_counts.add(rows_beside(rows - 1))
    rates, tokens = plan.setting.experts, rows * policy.pass_tokens
    if any(rates.few_are_chosen(layer, tokens) for layer in plan.spec.decoders):
        unused = policy.batch_size * policy.num_batches - rows
        row_counts.add(max(1, policy.batch_size // ENTRY_FRACTION - unused))
    return {number for number in row_counts if number < sizes[-1]}


def _rounding_of(plan: BlockPlan, prefixes: Sequence[Running]) -> dict[Tier, int]:
    """Returns bytes to allow for prefixes, which enter apart: one of its blocks or states each,
    where a tier has a part of the cache. A prefix that extends another also copies the other's
    state of this and the next layer to the device."""
    largest = [_largest_kept(running) for running in prefixes]
    divided_tiers = [tier for tier in TIERS if 0 < plan.policy.cache.fraction(tier) < 1]
    allowed = dict.fromkeys(divided_tiers, sum(largest))
    if len(prefixes) > 1 and not plan.unified:
        states = prefixes[0].layers
        copied = max(sum(sizes.sealed for sizes in state.sizes) for state in states)
        allowed["device"] = allowed.get("device", 0) + 2 * copied
    if prefixes and not plan.policy.order.waits:  # its hidden states, in addition to full batches
        hidden = plan.spec.hidden_bytes(1, max(prefixes[0].chunks), plan.dtype)
        for tier in TIERS:
            is_used = tier == "device" or plan.policy.activations.fraction(tier) > 0
            allowed[tier] = allowed.get(tier, 0) + hidden * is_used
    return allowed


def _largest_kept(running: Running) -> int:
    """Returns the bytes of the largest sealed block or state of a batch."""
    sealed = [sizes.sealed for state in running.layers for sizes in state.sizes]
    states = [state.replaced().nbytes for state in running.layers if state.layer.replaced]
    return max([0, *sealed, *states])


def _rounding(plan: BlockPlan, first: Running) -> dict[Tier, int]:
    """Returns bytes to allow for batches that enter apart, each with rounding errors of its own.

    Where a tier has a part of the cache, those are two of the largest blocks or states: the
    batches' bytes there are exact up to one batch, and their bytes when the oldest remaining batch
    entered. Where it has a part of the hidden states, those of one more batch may be there.
    """
    cache, activations = plan.policy.cache, plan.policy.activations
    largest = max(map(_first_open, first.layers)) if first.blocks.generated else 0
    prompt = plan.spec.hidden_bytes(first.shape.rows, max(first.chunks), plan.dtype)
    is_used = {"device": True, "host": cache.device < 1, "disk": cache.disk > 0}
    allowed = dict[Tier, int]()
    for tier in TIERS:
        has_part = 0 < cache.fraction(tier) < 1
        has_hidden = 0 < activations.fraction(tier) < 1
        blocks = 2 * max(largest, _largest_kept(first)) if has_part else largest
        hidden = max(_hidden_bytes(plan), prompt if has_hidden else 0)
        allowed[tier] = blocks * is_used[tier] + hidden * (tier != "disk" or has_hidden)
    return allowed


def _telling_tokens(
    plan: BlockPlan, batches: Sequence[Running]
) -> tuple[list[int], dict[Tier, int]]:
    """Returns the tokens at which memory can be at its peak, and bytes to allow by tier for those
    that are left out.

    These are the prompt, the last token, and, where sealing blocks can free memory, the last token
    that does it. While a token seals blocks one by one, memory moves from one sum to the next,
    apart from the block being sealed, the new open block and the old open block: every placement is
    exact up to one block. Other sealing tokens with nearly the same memory, and the token before
    each, are also visited; only if blocks go to disk, where all such tokens are equivalent, an
    allowance is added instead.

    For 100 tokens in blocks of 32 on the device, packed when full, tokens 0, 31, 32, 63, 64, 95,
    96, 98 and 99 are visited: 32, 64 and 96 seal a block, and one token earlier an open block is
    largest.
    """
    last, size = plan.shape.gen_len - 1, plan.policy.kv_block_tokens
    seals = list(range(size, last, size)) if last > 1 else []
    ends = {0, last}
    if not seals or (plan.policy.cache_bits == 16 and not plan.policy.cache.disk):
        return sorted(ends | {max(last - 1, 0)}), {}
    largest = max(_first_open(state) for running in batches for state in running.layers)
    slack = (PENDING_WRITES + 3) * largest
    tokens, allowed = {seals[-1]}, dict[Tier, int]()
    for tier, held in _held_between(batches, len(seals)).items():
        sums = [max(pair) for pair in pairwise(held)]
        least = max(1, max(sums) - slack)
        close_to_peak = [n for n, nbytes in enumerate(sums[:-1]) if nbytes >= least]
        tokens |= {seals[n] for n in close_to_peak}
        allowed[tier] = _hidden_bytes(plan)
        allowed[tier] += largest if max(sums) or not plan.unified else 0
        allowed[tier] += 3 * largest + max(sums) - sums[-1] if close_to_peak else 0
    if plan.policy.cache.disk:
        return sorted(ends | {seals[-1] - 1, seals[-1]}), allowed
    return sorted(ends | {last - 1} | tokens | {token - 1 for token in tokens}), {}


def _hidden_bytes(plan: BlockPlan) -> int:
    """Returns the bytes of the hidden states of a step after the prompt, of each sequence."""
    tokens = plan.policy.pass_tokens
    return plan.spec.hidden_bytes(sum(plan.shape.batch_sizes), tokens, plan.dtype)


def _held_between(batches: Sequence[Running], seals: int) -> dict[Tier, list[int]]:
    """Returns the bytes of generated tokens' KV blocks in memory, by tier, before and after each of
    the tokens that seal blocks."""
    held: dict[Tier, list[int]] = {tier: [0] * (seals + 1) for tier in ("device", "host")}
    for state in (state for running in batches for state in running.layers):
        prompt = len(state.running.blocks.prompt)
        for count in range(seals + 1) if state.homes else ():
            home, sizes = state.homes[prompt + count], state.sizes[prompt + count]
            sums = held["device" if home == "device" else "host"]
            sums[count] += sizes.open
            for later in range(count + 1, seals + 1) if home != "disk" else ():
                sums[later] += sizes.sealed
    return held


def _first_open(state: LayerState) -> int:
    """Returns the bytes of a layer's first block of generated tokens while it is open."""
    first = len(state.running.blocks.prompt)
    return state.sizes[first].open if state.homes else 0


def dry_run(
    plan: BlockPlan, tokens: Mapping[int, int] | None = None, arrivals: Planned | None = None
) -> dict[Tier, int]:
    """Returns the most bytes in each tier of a run without arrays or time.

    tokens, arrivals: see `BlockLoop`.
    """
    ledger = planned_ledger(plan)
    idle = Idle(plan.policy.pass_tokens)
    loop = BlockLoop(plan, idle, ledger, tokens, across_skipped=False, arrivals=arrivals)
    loop.run()
    return ledger.peak


def planned_ledger(plan: BlockPlan) -> Ledger:
    """Returns a ledger without budgets, with the reservations before a batch group begins."""
    ledger = Ledger({})
    for tier, nbytes in plan.weights_held.items():
        ledger.reserve(tier, nbytes)
    ledger.reserve("device", run_workspace(plan))
    return ledger


def run_workspace(plan: BlockPlan) -> int:
    """Returns a run's device memory besides weights and batches: temporaries, the cache of experts,
    and the drafter, if any."""
    nbytes = _temporaries(plan) + plan.expert_cache_bytes
    if plan.policy.draft_tokens:
        shape = plan.shape
        lengths = (shape.prefix + tokens + shape.gen_len for tokens in shape.prompt_lens)
        nbytes += plan.setting.drafts.held(sum(map(mul, shape.batch_sizes, lengths)))
    return nbytes


def _temporaries(plan: BlockPlan) -> int:
    """Returns the bytes of temporaries and results of a block's largest computation."""
    batches = [batch for group, _ in plan.entries for batch in group]
    shapes = {(batch.rows, plan.chunks(batch)) for batch in batches}
    return max(
        workspace_bytes(
            setting=plan.setting,
            formats=plan.formats,
            rows=rows,
            tokens=max(*chunks, plan.policy.pass_tokens),
            head=plan.shape.head,
            unpacks=plan.unpacks,
            is_chunked=len(chunks) > 1,
            prefix=plan.shape.prefix,
            pass_tokens=plan.policy.pass_tokens,
        )
        for rows, chunks in shapes
    )


def workspace_bytes(
    setting: Setting,
    formats: Formats,
    rows: int,
    tokens: int,
    head: HeadUse = GREEDY,
    unpacks: bool = False,
    is_chunked: bool = False,
    prefix: int = 0,
    pass_tokens: int = 1,
) -> int:
    """Returns the bytes of temporaries and results of the largest computation.

    That is a layer's prefill of `rows` prompts of `tokens` tokens, or the head. unpacks: whether a
    layer's weights are unpacked as a whole; is_chunked: whether these tokens are a chunk, which
    attends to earlier ones; prefix: tokens before all prompts; pass_tokens: those of each sequence
    that a step after the prompt computes.
    """
    spec, sizes = model_spec(setting.config), setting.sizes
    plain = replace(formats, weight_bits=16) if unpacks else formats
    group = sizes.prefill_sequences(rows, tokens, plain.weight_bits)
    formed = 0 if head == SCORE else rows * pass_tokens
    if head in (SCORE, SAMPLE_AND_READ):
        formed = max(formed, min(sizes.scored_rows, group * tokens))
    logits = head.logit_copies * formed * setting.config.vocab_size * 4
    of_head = logits + _unpacked_table(spec, formats, sizes, formed)
    of_layers = max(
        _unpacked_bytes(layer, formats, sizes, group * tokens, unpacks)
        + max(_prefill_bytes(layer, spec, plain, sizes, rows, tokens), logits)
        + (_chunk_bytes(layer, formats, rows, tokens, prefix) if is_chunked or prefix else 0)
        + _expert_bytes(layer, formats, sizes, rows, tokens)
        for layer, _ in spec.decoder_kinds
    )
    return max(of_layers, of_head)


def _unpacked_table(spec: ModelSpec, formats: Formats, sizes: KernelSizes, rows: int) -> int:
    """Returns the bytes that a GPU unpacks of the head's table at a time, those of the scales, two
    for 32 elements, that are copied to keep the parts in order, and the product's scratch."""
    tables = [tensor for tensor in spec.layers[-1].tensors if tensor.is_table]
    if not sizes.unpacks_layers or spec.layers[-1].kind != "head":
        return 0
    packed = [tensor for tensor in tables if formats.weight(tensor).format is not None]
    item = DTYPES[formats.dtype]
    unpacked = [min(x.size * item, sizes.unpacked_bytes(rows, x.shape[0])) for x in packed]
    largest = max(unpacked, default=0)
    return largest + largest // 32 + SCRATCH


def _chunk_bytes(layer: LayerSpec, formats: Formats, rows: int, tokens: int, prefix: int) -> int:
    """Returns the bytes that a chunk of prompts takes besides those of a whole prompt: queries and
    partial results of all sequences, and keys and values of an earlier chunk and of the prefix in
    the dtype."""
    item = DTYPES[formats.dtype]
    row_bytes = layer.row_size * item
    if not layer.attends:  # it computes a chunk as it does a whole prompt
        return rows * tokens * row_bytes
    attention = layer.attention
    partial = attention.query_size * 4 + attention.num_heads * 4
    per_token = attention.query_size * item + (3 if prefix else 2) * partial + row_bytes
    return rows * tokens * per_token + prefix * row_bytes


def _expert_bytes(
    layer: LayerSpec, formats: Formats, sizes: KernelSizes, rows: int, tokens: int
) -> int:
    """Returns the bytes that experts take besides those of the layer's attention: hidden states
    before and after, input, routing and result for all tokens, and one expert's working set."""
    experts, item = layer.experts, DTYPES[formats.dtype]
    if experts is None:
        return 0
    count, hidden = rows * tokens, layer.hidden_size
    routed = count * (hidden * (3 * item + 2 * 4) + experts.top * 16 + 16 + experts.count * 8)
    width = experts.expert.width * (1 + experts.expert.is_gated)
    at_once = experts.rows_at_once(count, sizes.expert_rows)
    return routed + at_once * (width * (4 + item) + hidden * (8 + 2 * item))


def _prefill_bytes(
    layer: LayerSpec, spec: ModelSpec, formats: Formats, sizes: KernelSizes, rows: int, tokens: int
) -> int:
    """Returns the bytes of a decoder layer's prefill of the sequences that go through together."""
    item = DTYPES[formats.dtype]
    group = sizes.prefill_sequences(rows, tokens, formats.weight_bits)
    count = group * tokens
    mlp = count * layer.mlp_width * (4 + item)
    mixing = count * layer.mixer.inner_size * item
    if layer.attends:
        attention = layer.attention
        heads = max(sizes.scored_heads(group * attention.num_heads, tokens), attention.group)
        mixing += count * attention.prompt_size * 4 + 2 * heads * tokens * tokens * 4
    else:
        mixing += 2 * rows * layer.state_bytes(formats.dtype)
    per_token = spec.hidden_size * (4 + 3 * item) + layer.row_size * item
    prefill = max(mlp, mixing) + count * per_token
    # Hidden states, keys and values of finished groups, twice if they have to be joined, and the
    # keys and values of the previous step, which are passed on while this one runs.
    if group < rows:
        produced, row_size = spec.hidden_size, layer.row_size
        products = (
            produced + 2 * row_size if rows % group == 0 else 2 * (produced + row_size) + row_size
        )
        prefill += rows * tokens * products * item
    return prefill


def _unpacked_bytes(
    layer: LayerSpec, formats: Formats, sizes: KernelSizes, rows: int, unpacks: bool
) -> int:
    """Returns the bytes that are unpacked of a decoder layer's kernels, for products of `rows`."""
    unpacked = 0
    largest = max(tensor.size for tensor, _ in layer.large_shapes) * DTYPES[formats.dtype]
    if unpacks:
        return layer.large_size * DTYPES[formats.dtype]
    if formats.weight_bits < 16:
        part = sizes.unpacked_bytes(rows, layer.mlp_width)
        unpacked = max(min(sizes.part_bytes, MAX_UNPACKED_BYTES), min(largest, part))
    if formats.matmul_bits == 8:  # a kernel's integers, and the product of outliers
        unpacked = max(unpacked, 2 * largest) + rows * layer.mlp_width * 4
    return unpacked
