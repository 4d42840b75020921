"""The loads of single steps: KV blocks, what layers replace with every token, and hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.buffers import Ring
from flexgen_jax.schedule.cache_blocks import CacheBlocks
from flexgen_jax.schedule.loads import Loader, PartLoad, Stream
from flexgen_jax.schedule.passes import Handle
from flexgen_jax.schedule.replaced import ReplacedArrays
from flexgen_jax.schedule.running import LayerState, Running
from flexgen_jax.schedule.waves import LookAhead, Step


class Prefetch:
    """Loads the batch data of steps ahead of use.

    before: the token that a loop has visited before each, where it leaves tokens out;
    across_skipped: whether the cache may be read for a token before those that are left out are
    made up for: with tokens 0, 1 and 30 it may be read for 30 while 1 computes, as it would be for
    2; a real run would still be busy with 2 to 29, so that memory is then not exact. going: the
    batches under way, kept by the loop. replaces: of each layer, whether it has arrays that it
    replaces with every token.
    """

    def __init__(
        self,
        plan: BlockPlan,
        loader: Loader,
        ring: Ring,
        ahead: LookAhead,
        cache: CacheBlocks,
        replaced: ReplacedArrays,
        going: Sequence[Running],
        before: Mapping[int, int],
        across_skipped: bool,
    ) -> None:
        self._plan, self._loader, self._ring, self._ahead = plan, loader, ring, ahead
        self._cache, self._replaced, self._going = cache, replaced, going
        self._before, self._across_skipped = before, across_skipped
        decoders = [None, *plan.spec.decoders, None]
        self._grows = [layer is not None and bool(layer.growing) for layer in decoders]
        self.replaces = [layer is not None and bool(layer.replaced) for layer in decoders]
        self._has_states = any(self.replaces)
        self._cached: Stream[Step] = Stream(loader, self._start_cached)
        self._states: Stream[Step] = Stream(loader, self._start_state)
        self._hidden: Stream[Step] = Stream(loader, self._start_hidden)

    # What a step needs

    def takes_cache(self, step: Step) -> bool:
        """Returns whether a step uses KV blocks that earlier ones have made."""
        if not self._grows[step.layer]:
            return False
        return step.token > 0 or (
            not self._plan.only_caches(step.token, step.layer)
            and step.batch.span(step.token).start > 0
        )

    def takes_state(self, step: Step) -> bool:
        """Returns whether a step's layer continues an earlier step's state."""
        if not self.replaces[step.layer]:
            return False
        return step.token > 0 or step.batch.span(step.token).start > 0

    def token_before(self, token: int) -> int:
        """Returns the token that the loop has visited before one."""
        return self._before.get(token, token - 1)

    def is_waiting(self, step: Step) -> bool:
        """Returns whether a step's hidden states have been handed over by now."""
        return self._replaced.is_ready(step.batch.hidden, step.token, step.layer - 1)

    def _is_cached(self, step: Step) -> bool:
        """Returns whether the KV blocks that a step uses are complete by now."""
        if not self.takes_cache(step):
            return False
        state = state_of(step)
        if state.until is None or state.until != self.token_before(step.token):
            return False
        return self._across_skipped or state.tokens >= step.batch.span(step.token).start

    def _is_stored(self, step: Step) -> bool:
        """Returns whether a step's input state has been stored."""
        if not self.takes_state(step):
            return False
        before = self.token_before(step.token)
        return self._replaced.is_ready(state_of(step).slot, before, step.layer)

    # Loads

    def _start_cached(self, step: Step) -> PartLoad:
        start = step.batch.span(step.token).start
        return self._loader.start(self._cache.part(state_of(step), start))

    def _start_state(self, step: Step) -> PartLoad:
        return self._loader.start(self._replaced.part(state_of(step).slot))

    def _start_hidden(self, step: Step) -> PartLoad:
        return self._loader.start(self._replaced.part(step.batch.hidden))

    def read_ahead(self) -> None:
        """Starts prefetching from disk for the steps that come next."""
        ahead = self._plan.ahead
        # When all batches begin, read buffers must not add to memory that prompts still hold.
        if self._may_read():
            for later in self._ahead.counted(ahead.cache_reads):
                if later in self._cached or not self._is_cached(later):
                    continue
                weights = state_of(later).part
                if weights is None or not self._ring.has_room(weights.layouts):
                    break  # until other buffers are free: batches of other shapes have theirs
                self._cached.prefetch(later)
        for later in self._ahead.steps(ahead.hidden_reads):
            if later not in self._hidden and self.is_waiting(later):
                self._hidden.prefetch(later)
            if self._has_states and self._is_stored(later):
                self._states.prefetch(later)

    def _may_read(self) -> bool:
        """Returns whether some batch attends to its cache, or all have handed over the KV blocks of
        their prompts."""
        if any(running.has_attended for running in self._going):
            return True
        return all(running.is_cached for running in self._going)

    def copy_ahead(self) -> None:
        """Starts copying the next steps' inputs to the device."""
        for later in self._ahead.steps(self._plan.ahead.cache_copies):
            self._cached.copy_if_read(later)
            self._hidden.copy_if_read(later)
            if self._has_states:
                self._states.copy_if_read(later)

    def take_hidden(self, step: Step) -> Handle:
        return self._hidden.take(step)

    def take_early(self, step: Step) -> tuple[Step, Handle] | None:
        """Returns the next batch's step and input, if its query can be computed while the CPU
        attends for this one."""
        weights = state_of(step).part
        if weights is None or not weights.asks_host or not self._plan.policy.overlap:
            return None
        later = self._ahead.following()
        if later is None or later.visit != step.visit or later.token <= 0:
            return None
        weights = state_of(later).part
        if weights is None or not weights.asks_host or not self.is_waiting(later):
            return None
        return later, self.take_hidden(later)

    def take_cache(self, step: Step) -> Handle:
        """Returns the KV blocks that a step uses, None if there are none."""
        return self._cached.take(step) if self.takes_cache(step) else None

    def take_state(self, step: Step) -> Handle:
        """Returns a step's input state, None without one."""
        return self._states.take(step) if self.takes_state(step) else None

    def release(self, step: Step, dispatched: int) -> None:
        """Ends the loads of a step, which is number `dispatched` of all steps."""
        if self.takes_cache(step):
            step.batch.has_attended = True
            self._cached.release(step, dispatched)
        if self.takes_state(step):
            self._states.release(step, dispatched)
        if step.layer > 0:
            self._hidden.release(step, dispatched)

    def forget(self, running: Running, dispatched: int, token: int | None = None) -> None:
        """Drops the loads of a batch's later steps: all loads, or a token's layer states."""
        streams = [self._cached, self._states]
        streams += [self._hidden] if token is None else []
        for stream in streams:
            stream.keep_only(
                lambda step: step.batch is not running or token not in (None, step.token),
                dispatched,
            )

    def close(self) -> None:
        """Ends all loads."""
        for stream in (self._hidden, self._states, self._cached):
            stream.close()


def state_of(step: Step) -> LayerState:
    """Returns a decoder layer's state of a step's batch."""
    return step.batch.layers[step.layer - 1]
