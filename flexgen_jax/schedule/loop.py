"""The loop over the steps of batches that enter and leave.

Prefetches, the order of stores, and reservations of memory are decided only here and in its parts
(`visits.py`, `prefetch.py`, `cache_blocks.py`, `replaced.py`). A backend carries it out: the
runtime with arrays (`offload/executor.py`), the simulator with a clock (`simulate.py`), a dry run
with nothing but the ledger (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Tier
from flexgen_jax.schedule.arrivals import Planned
from flexgen_jax.schedule.backend import Backend, Inputs
from flexgen_jax.schedule.buffers import Ring
from flexgen_jax.schedule.cache_blocks import CacheBlocks
from flexgen_jax.schedule.ledger import Ledger
from flexgen_jax.schedule.loads import Loader
from flexgen_jax.schedule.passes import Handle
from flexgen_jax.schedule.prefetch import Prefetch, state_of
from flexgen_jax.schedule.replaced import ReplacedArrays
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.shrinking import Shrinking
from flexgen_jax.schedule.visits import Visits
from flexgen_jax.schedule.waves import Arrivals, LookAhead, Step, Steps, Waves


class Dispatched(NamedTuple):
    """A step whose results are still to be stored; steps are numbered from 1."""

    step: Step
    number: int
    computed: Handle


def restore(prefix: Running, cache: CacheBlocks, replaced: ReplacedArrays) -> None:
    """Loads a stored prefix's state through the backend, layer by layer."""
    for state in prefix.layers:
        for token in prefix.tokens if state.homes else ():
            cache.put_prompt(token, state, None)
        if state.layer.replaced:
            replaced.put(prefix.tokens[-1], state.replaced(), None)
        state.until = prefix.tokens[-1]
    prefix.layers_filled = len(prefix.layers)
    prefix.is_in_prompt = False


def unused(going: Sequence[Running]) -> Running | None:
    """Returns a prefix that nobody uses any more; None if there is none."""
    return next((running for running in going if running.is_prefix and not running.users), None)


class BlockLoop:
    """Walks a schedule's steps over arriving batches, until all are finished.

    Everything that is prefetched is derived from the steps to come. Without overlap, the
    look-ahead is zero and the loop waits after every step; nothing else differs.

    arrivals: the batches to come, by default those of the plan. tokens: the tokens to visit in
    order (0 is the prompt), and the number of tokens that each represents; by default all, one by
    one. across_skipped: see `Prefetch`. peaks: the bytes by tier that were planned; free buffers
    are given up, and batches do not shrink, where more would be in use. None if nothing was
    planned. steps: those to compute, by default in the order of the policy's schedule. keeps_last:
    whether the last tokens' states are also stored, for a KV store.
    """

    def __init__(
        self,
        plan: BlockPlan,
        backend: Backend,
        ledger: Ledger,
        tokens: Mapping[int, int] | None = None,
        across_skipped: bool = True,
        arrivals: Arrivals | None = None,
        peaks: Mapping[Tier, int] | None = None,
        steps: Steps | None = None,
        keeps_last: bool = False,
    ) -> None:
        self._keeps_last = keeps_last
        self._plan, self._backend, self._ledger = plan, backend, ledger
        self._tokens, self._peaks = tokens or {}, peaks
        layers = plan.spec.layers
        self._kinds = [layer.kind for layer in layers]
        self._arrivals = arrivals or Planned(plan, tuple(self._tokens))
        decoders = frozenset(n for n, layer in enumerate(layers) if layer.kind == "decoder")
        steps = steps or Waves(plan.policy.order, len(layers), self._arrivals)
        self._ahead = LookAhead(steps, decoders)
        self._ring = Ring(backend, ledger)
        self._loader = Loader(backend, ledger, self._ring)
        self._going: list[Running] = []
        self._cache = CacheBlocks(plan, backend, ledger, self._ring)
        self._replaced = ReplacedArrays(backend, ledger)
        self._visits = Visits(plan, self._loader, self._ahead, self._cache, self._going)
        self._prefetch = Prefetch(
            plan=plan,
            loader=self._loader,
            ring=self._ring,
            ahead=self._ahead,
            cache=self._cache,
            replaced=self._replaced,
            going=self._going,
            before={later: token for token, later in pairwise(self._tokens)},
            across_skipped=across_skipped,
        )
        self._shrinking = Shrinking(
            backend=backend,
            ledger=ledger,
            cache=self._cache,
            prefetch=self._prefetch,
            last_decoder=plan.spec.last_decoder,
            peaks=peaks,
        )
        self._latest: Dispatched | None = None
        self._begun: Step | None = None
        self._dispatched = 0

    @property
    def guessed(self) -> dict[str, int]:
        """How many experts were loaded by guess, and then chosen ("right") or not ("wrong")."""
        return {"right": self._visits.guessed_right, "wrong": self._visits.guessed_wrong}

    @property
    def cached_experts(self) -> dict[str, int]:
        """How many chosen experts were in the device's cache of experts, and how many were not."""
        cache = self._visits.expert_cache
        return {"hits": cache.hits, "misses": cache.misses}

    def run(self) -> int:
        """Computes the steps of all batches until all are finished; returns the most bytes of
        host buffers that there were."""
        for _ in self.steps():
            pass
        return self._ring.most

    def steps(self) -> Iterator[None]:
        """Computes the steps of all batches, one at a time."""
        try:
            with self._ring.relieved(self._peaks):
                yield from self._walk()
        finally:
            self._close()

    def _walk(self) -> Iterator[None]:
        while True:
            step = self._take()
            if step is not None:
                self._do(step)
            elif self._latest is not None:
                self._retire_latest(self._latest.step)
            else:
                if prefix := unused(self._going):
                    self._leave(prefix, self._begun)
                yield  # report requests that ended without a step before waiting
                if not self._arrivals.wait():
                    return
            yield

    def _take(self) -> Step | None:
        """Takes the next step. For a batch's first step, earlier results are stored before it is
        dispatched: if they are another batch's last results, whose memory is needed now, this
        step's loads are kept."""
        following = self._ahead.following()
        if following is None:
            return None
        if not following.batch.is_going:
            self._retire_latest(following)
        return self._ahead.take()

    def _do(self, step: Step) -> None:
        """Dispatches a step, stores the previous step's results, and reads ahead."""
        self._begun = step
        begins_pass = self._begins_pass(step)
        if begins_pass:
            self._retire_latest(step)  # this pass computes the tokens that the last one accepted
            if not step.batch.is_going:
                return
        if step.batch.shrinks_at(step.token):
            self._shrink(step)
            if not step.batch.is_going:
                return
        begun_step = self._backend.begin(step, self._tokens.get(step.token, 1))
        if begins_pass:
            step.batch.passes.begin(step.token, begun_step, step.batch.lengths)
        if not step.batch.is_going:
            self._enter(step)
        moves = not self._plan.is_resident
        if moves and self._waits(step):
            self._retire_latest(step)
        inputs = self._inputs(step)
        if moves:
            self._prefetch.copy_ahead()
            self._visits.copy_ahead(step)
        dispatched = Dispatched(step, self._dispatched + 1, self._compute(step, inputs))
        if moves:
            self._visits.release(step, self._dispatched)
        self._retire_latest(step)
        self._latest = dispatched
        # The last step of a finished batch holds buffers that the next batch needs.
        if not self._plan.policy.overlap or not self._going:
            self._retire_latest(step)
        if moves:
            self._visits.read_ahead(step.visit)
            self._prefetch.read_ahead()

    def _begins_pass(self, step: Step) -> bool:
        """Returns whether a batch's next pass, with draft tokens, begins."""
        is_pass = self._plan.policy.draft_tokens and step.token > 0
        return bool(is_pass) and self._kinds[step.layer] == "embedding"

    def _waits(self, step: Step) -> bool:
        """Returns whether a step's weights are copied only when the layer before is computed."""
        is_next = self._latest is not None and self._latest.step.visit != step.visit
        return is_next and not self._plan.policy.copies_ahead

    def _enter(self, step: Step) -> None:
        """Admits the batch of its first step."""
        if not self._dispatched and not self._plan.is_resident:
            self._visits.read_ahead(-1)
        stored = [
            prefix for prefix in step.batch.prefixes if prefix.is_stored and not prefix.is_going
        ]
        for running in (*stored, step.batch):
            self._replaced.enter(running)
            self._cache.enter(running, self._going)
            running.is_going = True
            self._going.append(running)
            self._visits.count_rows()
            if running.is_stored:
                restore(running, self._cache, self._replaced)

    # Steps

    def _inputs(self, step: Step) -> Inputs:
        """Returns a step's inputs, in flight to the device."""
        held = self._visits.take(step)
        if self._kinds[step.layer] == "embedding":
            if step.token - self._prefetch.token_before(step.token) > 1:
                self._skip_to(step)
            return Inputs(held.weights)
        hidden = self._prefetch.take_hidden(step)
        if self._kinds[step.layer] == "head":
            return Inputs(held.weights, hidden=hidden)
        experts = self._visits.chosen(step)
        cache, replaced = self._prefetch.take_cache(step), self._prefetch.take_state(step)
        if step.batch.shrinks_at(step.token):
            self._shrinking.shrink_state(step, cache, replaced, self._dispatched + 1)
        return Inputs(
            weights=held.weights,
            prefixes=held.prefixes,
            hidden=hidden,
            cache=cache,
            replaced=replaced,
            early=self._prefetch.take_early(step),
            experts=experts,
        )

    def _compute(self, step: Step, inputs: Inputs) -> Handle:
        """Dispatches one layer for one batch, and passes on results that are available."""
        computed = self._backend.compute(step, inputs)
        self._dispatched += 1
        if step.token > 0:
            step.batch.is_in_prompt = False
        self._prefetch.release(step, self._dispatched)
        if self._prefetch.replaces[step.layer] and self._is_kept(step):
            self._replaced.put(step.token, state_of(step).replaced(), computed)
        if self._has_output(step):
            part = step.batch.hidden_part(step.token, step.layer)
            self._replaced.put(step.token, part, computed)
        return computed

    def _has_output(self, step: Step) -> bool:
        """Returns whether another layer takes a step's hidden states."""
        is_head = self._kinds[step.layer] == "head"
        return not is_head and not self._plan.only_caches(step.token, step.layer)

    def _skip_to(self, step: Step) -> None:
        """Makes up for the tokens that were left out before a step's, in all batches that are as
        far as this one."""
        last = step.batch.layers[-1]
        if last.tokens >= step.batch.span(step.token).start:
            return
        alike = [running for running in self._going if running.layers[-1].until == last.until]
        self._cache.skip(alike, step.token)

    def _retire_latest(self, following: Step) -> None:
        """Stores the results of the second-to-last dispatched step, so that the device stays busy
        while the loop waits for it. following: the previous or the next batch."""
        if self._latest is None:
            return
        (step, number, computed), self._latest = self._latest, None
        rows = self._backend.finish(step, computed)
        self._ring.finished = number
        running = step.batch
        if not running.is_going:
            return  # it was dispatched before the batch was known to be done
        if self._kinds[step.layer] == "head":
            if rows == 0 or step.token == self._last_token(running):
                self._leave(running, following)
            elif rows is not None and running.shrinking is None:
                self._shrinking.wish(step, following, rows, self._last_token(running))
            return
        if self._has_output(step):
            self._replaced.settle(running.hidden, step.token, step.layer)
        if self._kinds[step.layer] == "decoder" and self._is_kept(step):
            self._store_state(step, computed)

    def _is_kept(self, step: Step) -> bool:
        """Returns whether a step's state is stored, for a later step or for a KV store."""
        is_last = step.token == self._last_token(step.batch)
        return not is_last or (self._keeps_last and step.token > 0)

    def _store_state(self, step: Step, computed: Handle) -> None:
        """Stores a layer's state after a step."""
        state = state_of(step)
        if self._prefetch.replaces[step.layer]:
            self._replaced.settle(state.slot, step.token, step.layer)
        if state.layer.growing and step.token <= 0:
            self._cache.put_prompt(step.token, state, computed)
        elif state.layer.growing:
            self._cache.put_token(state, computed)
        if state.until is None:
            step.batch.layers_filled += 1
        state.until = step.token
        if step.token == -1 and step.batch.is_prefix:  # its last one
            step.batch.is_in_prompt = step.layer != self._plan.spec.last_decoder

    def _last_token(self, running: Running) -> int:
        return max(self._tokens, default=running.shape.gen_len - 1)

    # Batches

    def _shrink(self, step: Step) -> None:
        """Leaves a batch with fewer rows, from a step in the embedding on."""
        if self._kinds[step.layer] == "embedding":
            self._retire_latest(step)  # which may be the head's, for all rows
            self._shrinking.shrink(step)
            self._visits.count_rows()

    def _leave(self, running: Running, following: Step | None) -> None:
        """Drops a batch's remaining steps and loads, and frees its memory; then the prefixes
        that nobody uses any more."""
        self._going.remove(running)
        self._visits.count_rows()
        self._ahead.drop(running)
        self._prefetch.forget(running, self._dispatched)
        self._cache.release_buffers(running, self._dispatched)
        running.close()
        if self._plan.is_resident:
            self._visits.forget_shared(running)
        elif following is not None:
            self._visits.forget(following, self._dispatched)
        if prefix := unused(self._going):
            self._leave(prefix, self._begun)

    def _close(self) -> None:
        """Releases everything, also after an error or Ctrl-C, and even if a release fails."""
        with ExitStack() as stack:
            stack.callback(self._ring.close)
            for running in self._going:
                stack.callback(running.close)
            for loads in (self._loader, self._prefetch, self._visits):
                stack.callback(loads.close)
        self._going.clear()
