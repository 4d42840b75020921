"""The loop over the steps of batches that enter and leave.

What is prefetched when, in which order results are stored, and when memory is reserved and
released stands here, once. A backend carries it out: the runtime with arrays
(`offload/executor.py`), the simulator with a clock (`simulate.py`), a dry run with nothing but the
ledger (`memory.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from typing import NamedTuple

from flexgen_jax.policy.arrivals import Planned
from flexgen_jax.policy.backend import Backend, ChosenExperts, Handle, Inputs
from flexgen_jax.policy.buffers import Ring
from flexgen_jax.policy.cache_blocks import CacheBlocks, LayerBatch
from flexgen_jax.policy.hidden_states import HiddenStates
from flexgen_jax.policy.ledger import Ledger
from flexgen_jax.policy.loads import Load, Loader, Stream
from flexgen_jax.policy.plan import BlockPlan, CachedPart, WeightsPart
from flexgen_jax.policy.policy import Tier
from flexgen_jax.policy.schedule import PREFIX, Arrivals, LookAhead, Step, Steps, Waves

ROWS_OF_A_LARGE_BATCH = 64
"""Above this, a batch shrinks in smaller steps."""

VisitPart = tuple[int, WeightsPart | CachedPart]
"""A visit, and what it needs for all batches: a part of the weights, or the prefix's cache. Where
nothing is ever loaded, 0 stands for all visits."""


class Dispatched(NamedTuple):
    """A step whose results are still to be stored; steps are numbered from 1."""

    step: Step
    number: int
    computed: Handle


class BlockLoop:
    """Walks a schedule's steps over the batches that arrive, until every batch is done.

    Everything that is prefetched is derived from the steps to come. Without overlap, the
    look-ahead is zero and the loop waits after every step; nothing else differs.

    arrivals: the batches to come, by default those of the plan. tokens: the tokens to visit, in
    their order, 0 being the prompt, and how many tokens each of them stands for; by default all,
    and each for itself. reads_over_gaps: whether the cache is prefetched for a token before the
    tokens left out before it are made up for, as it would be for a token that follows; memory is
    then not exact. peaks: the bytes by tier that were planned; free buffers are given up, and
    batches do not shrink, where more would be in use. None if nothing was planned. steps: those to
    compute, by default in the order of the policy's schedule.

    guessed_right, guessed_wrong: how many experts were loaded by guess, and then chosen or not.
    """

    def __init__(
        self,
        plan: BlockPlan,
        backend: Backend,
        ledger: Ledger,
        tokens: Mapping[int, int] | None = None,
        reads_over_gaps: bool = True,
        arrivals: Arrivals | None = None,
        peaks: Mapping[Tier, int] | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._plan, self._backend, self._ledger = plan, backend, ledger
        self._tokens, self._peaks = tokens or {}, peaks
        self._reads_over_gaps = reads_over_gaps
        self._before = {later: token for token, later in pairwise(self._tokens)}
        layers = plan.spec.layers
        self._kinds = [layer.kind for layer in layers]
        self._arrivals = arrivals or Planned(plan, tuple(self._tokens))
        decoders = frozenset(n for n, layer in enumerate(layers) if layer.kind == "decoder")
        steps = steps or Waves(plan.policy.order, len(layers), self._arrivals)
        self._ahead = LookAhead(steps, decoders)
        self._ring = Ring(backend, ledger)
        self._loader = Loader(backend, ledger, self._ring)
        self._weights: Stream[VisitPart] = Stream(self._loader, self._start_weights)
        self._cached: Stream[Step] = Stream(self._loader, self._start_cached)
        self._hidden: Stream[Step] = Stream(self._loader, self._start_hidden)
        self._cache = CacheBlocks(plan, backend, ledger, self._ring)
        self._states = HiddenStates(backend, ledger)
        self._cached_until: dict[LayerBatch, int] = {}
        self._going: set[int] = set()
        self._shrinking: dict[int, tuple[int, int]] = {}
        self._attending: set[int] = set()
        self._prompting: set[int] = set()
        self._taken: dict[VisitPart, None] = {}
        self._held: dict[tuple[int, bool, CachedPart | None], list[Handle]] = {}
        self._routed = (-1, 0)
        self.guessed_right = self.guessed_wrong = 0
        self._to_copy: deque[VisitPart] = deque()
        self._bytes_to_copy = self._live_rows = 0
        self._steps_left = 0
        self._read_for: int | None = None
        self._read_until = -1
        self._copied_for: int | None = None
        self._latest: Dispatched | None = None
        self._dispatched = 0

    def run(self) -> int:
        """Computes the steps of all batches, until every one is done; returns the most bytes of
        host buffers that there were."""
        for _ in self.steps():
            pass
        return self._ring.most

    def steps(self) -> Iterator[None]:
        """Computes the steps of all batches, one at a time."""
        try:
            with self._relief():
                yield from self._walk()
        finally:
            self._close()

    def _relief(self) -> AbstractContextManager[None]:
        if self._peaks is None:
            return nullcontext()
        return self._ledger.relieved("host", self._peaks["host"], self._ring.relieve)

    def _walk(self) -> Iterator[None]:
        while True:
            step = self._ahead.take()
            if step is not None:
                self._do(step)
            elif self._latest is not None:
                self._retire_latest(self._latest.step)
            elif not self._arrivals.wait():
                return
            yield

    def _do(self, step: Step) -> None:
        """Dispatches a step, stores the results of the one before, and reads ahead."""
        self._backend.begin(step, self._tokens.get(step.token, 1))
        if self._is_shrinking(step):
            self._shrink(step)
            if step.batch not in self._going:
                return
        elif step.batch not in self._going:
            self._enter(step)
        inputs = self._inputs(step)
        if not self._plan.is_resident:
            self._copy_ahead(step)
        dispatched = Dispatched(step, self._dispatched + 1, self._compute(step, inputs))
        self._release_weights(step)
        self._retire_latest(step)
        self._latest = dispatched
        if not self._plan.policy.overlap:
            self._retire_latest(step)
        if not self._plan.is_resident:
            self._read_ahead(step)

    def _enter(self, step: Step) -> None:
        """Takes in the batch of a step, its first one."""
        self._retire_latest(step)  # if that is the last of a batch, its memory is needed now
        if not self._dispatched and not self._plan.is_resident:
            self._read_weights(-1)
        self._going.add(step.batch)
        self._prompting.add(step.batch)
        self._live_rows += self._plan.batches[step.batch].rows
        self._cache.enter(step.batch)

    def _shrink(self, step: Step) -> None:
        """Leaves a batch with fewer rows, from a step in the embedding on."""
        if self._kinds[step.layer] != "embedding":
            return
        self._retire_latest(step)  # which may be the head's, for all rows
        if step.batch in self._going:
            _, rows = self._shrinking[step.batch]
            self._live_rows += rows - self._plan.batches[step.batch].rows
            self._plan.shrink(step.batch, rows)
            self._backend.shrink(step, rows)

    def _keys(self, step: Step) -> list[VisitPart]:
        """Returns what a step computes with, but for experts that are loaded when they are
        chosen."""
        parts = self._plan.parts[step.layer]
        if self._loads_chosen(step):
            parts = tuple(part for part in parts if part.expert is None)
        visit = 0 if self._plan.is_resident else step.visit
        keys: list[VisitPart] = [(visit, part) for part in parts]
        prefix = self._plan.prefix_part(step)
        return keys if prefix is None else [*keys, (visit, prefix)]

    def _loads_chosen(self, step: Step) -> bool:
        """Returns whether experts are loaded only when a step has chosen them: if no batch will be
        in its prompt, as those are done with it that begin together, and few will be chosen."""
        if step.token <= 0 or self._plan.spec.layers[step.layer].experts is None:
            return False
        if self._prompting and step.batch not in self._prompting:
            return False
        return self._plan.loads_chosen(step.layer, self._live_rows)

    def _chosen(self, step: Step) -> ChosenExperts | None:
        """Returns how a step loads the experts that it chooses."""
        layer = self._plan.spec.layers[step.layer]
        if not self._loads_chosen(step):
            return None
        assert layer.experts is not None, "some are chosen"
        visit, before = self._routed
        rows = self._plan.batches[step.batch].rows + (before if visit == step.visit else 0)
        self._routed = (step.visit, rows)
        later = next(iter(self._ahead.visits(step.visit, 1, counts_all=True)), None)
        guesses = later is not None and self._loads_chosen(later)

        def load(numbers: Collection[int], guessed: Collection[int]) -> list[Handle]:
            keys = self._expert_keys(step, numbers)
            self.guessed_right += sum(
                key in self._weights for key in keys if key not in self._taken
            )
            for key in keys:  # all reads begin before any is waited for
                self._weights.prefetch(key)
            if guesses and later is not None:
                for key in self._expert_keys(later, guessed):
                    self._weights.prefetch(key)
            self._taken |= dict.fromkeys(keys)
            return [self._weights.take(key) for key in keys]

        count = layer.experts.count
        most, expected = min(count, rows * layer.experts.top), round(layer.chosen_experts(rows))
        return ChosenExperts(load, guesses, most, expected, count)

    def _expert_keys(self, step: Step, numbers: Collection[int]) -> list[VisitPart]:
        """Returns the experts with these numbers, of a step's layer, that are not on the device."""
        parts = self._plan.parts[step.layer]
        return [(step.visit, part) for part in parts if part.expert in numbers]

    # Loads

    def _start_weights(self, key: VisitPart) -> Load:
        part = key[1]
        if isinstance(part, CachedPart):
            where = (part.layer, part.batch)
            return self._loader.start(self._cache.part(where, self._plan.shape.prefix))
        return self._loader.start_kept(part) if part.is_kept else self._loader.start(part)

    def _start_cached(self, step: Step) -> Load:
        return self._loader.start(self._cache.part(_where(step), self._cached_tokens(step)))

    def _cached_tokens(self, step: Step) -> int:
        """Returns the number of tokens before a step's."""
        return self._plan.span(step.token, step.batch).start

    def _start_hidden(self, step: Step) -> Load:
        return self._loader.start(self._states.part(step.batch))

    def _read_ahead(self, step: Step) -> None:
        """Starts prefetching from disk for the layers and batches that come next."""
        if step.visit != self._read_for:
            self._read_weights(step.visit)
        ahead = self._plan.ahead
        # Where all batches begin, read buffers must not come on top of what prompts still hold.
        if self._attending or self._cache.has_all_prompts:
            for later in self._ahead.counted(ahead.cache_reads):
                if later in self._cached or not self._is_cached(later):
                    continue
                if not self._ring.has_room(self._cache.layouts(_where(later))):
                    break  # until other buffers are free: batches of other shapes have theirs
                self._cached.prefetch(later)
        for later in self._ahead.steps(ahead.hidden_reads):
            if later not in self._hidden and self._is_waiting(later):
                self._hidden.prefetch(later)

    def _read_weights(self, visit: int) -> None:
        """Starts prefetching the weights of the visits after `visit`."""
        self._read_for = visit
        # Embedding and head are read once per block: while they compute, the disk goes on with what
        # follows.
        for step in self._ahead.visits(visit, self._plan.ahead.weight_reads):
            if step.visit > self._read_until:
                self._read_until = step.visit
                for key in filter(self._is_there, self._keys(step)):
                    self._weights.prefetch(key)

    def _is_there(self, key: VisitPart) -> bool:
        """Returns whether what a visit needs can be loaded: weights, or a prefix that is
        computed."""
        part = key[1]
        if not isinstance(part, CachedPart):
            return True
        return self._cached_until.get((part.layer, PREFIX)) == -1

    def _copy_ahead(self, step: Step) -> None:
        """Starts the copies to the device that are to travel while a step computes, those that the
        next steps need first."""
        for later in self._ahead.steps(self._plan.ahead.cache_copies):
            self._cached.copy_if_read(later)
            self._hidden.copy_if_read(later)
        if step.visit != self._copied_for:
            copies = self._plan.ahead.weight_copies
            visits = self._ahead.visits(step.visit, copies, counts_all=True)
            keys = [key for later in visits for key in self._keys(later)]
            self._to_copy = deque(key for key in keys if not self._weights.is_copied(key))
            self._bytes_to_copy = sum(part.copied for _, part in self._to_copy)
            self._copied_for = step.visit
            self._steps_left = 1 + self._ahead.count_of(step.visit)
        if self._to_copy:
            self._copy_weights()
        self._steps_left -= 1

    def _copy_weights(self) -> None:
        """Starts the copies of the next visit's weights that are to travel beside the coming step:
        a share of the bytes, so that the steps of this visit have one each, in the order of use, as
        far as they are read."""
        wanted = self._bytes_to_copy / self._steps_left
        while self._to_copy:
            nbytes = self._to_copy[0][1].copied
            if wanted <= 0 < nbytes or not self._weights.copy_if_read(self._to_copy[0]):
                break
            self._to_copy.popleft()
            self._bytes_to_copy -= nbytes
            wanted -= nbytes

    def _release_weights(self, step: Step) -> None:
        """Releases a layer's weights after the last step of its visit, if they had to be loaded."""
        if self._plan.is_resident:
            return
        following = self._ahead.following()
        if following is None or following.visit != step.visit:
            for key in self._taken:
                self._weights.release(key, self._dispatched)
            self._taken.clear()
            self._held.clear()
            if self._plan.spec.layers[step.layer].experts is not None:
                self._drop_unchosen(step)

    def _drop_unchosen(self, step: Step) -> None:
        """Ends the loads of experts that were guessed for a visit, but not chosen."""
        keys: list[VisitPart] = [(step.visit, part) for part in self._plan.parts[step.layer]]
        unused = {key for key in keys if key in self._weights}
        self.guessed_wrong += len(unused)
        self._weights.keep_only(lambda key: key not in unused, self._dispatched)

    def _is_cached(self, step: Step) -> bool:
        """Returns whether the step attends to a KV cache that is complete by now."""
        where = _where(step)
        until = self._cached_until.get(where)
        if until is None or until != self._token_before(step.token):
            return False
        if not self._takes_cache(step):
            return False
        return self._reads_over_gaps or self._cache.has(where, self._cached_tokens(step))

    def _token_before(self, token: int) -> int:
        return self._before.get(token, token - 1)

    def _is_waiting(self, step: Step) -> bool:
        """Returns whether the step's input has been handed over by now."""
        return self._states.is_ready(step.token, step.layer - 1, step.batch)

    # Steps

    def _visit_weights(self, step: Step) -> list[Handle]:
        """Returns what all steps of a visit compute with that are like this one; the first of them
        takes it."""
        what = (step.layer, self._loads_chosen(step), self._plan.prefix_part(step))
        if what not in self._held:
            keys = self._keys(step)
            self._taken |= dict.fromkeys(keys)
            self._held[what] = [self._weights.take(key) for key in keys]
        return self._held[what]

    def _inputs(self, step: Step) -> Inputs:
        """Returns what a step computes with, on its way to the device."""
        weights = self._visit_weights(step)
        if self._kinds[step.layer] == "embedding":
            if step.token - self._token_before(step.token) > 1:
                self._skip_to(step)
            return Inputs(weights)
        hidden = self._hidden.take(step)
        if not self._takes_cache(step):
            return Inputs(weights, hidden)
        experts = self._chosen(step)
        cache = self._cached.take(step)
        if self._is_shrinking(step):
            self._cache.shrink(_where(step), cache, self._dispatched + 1)
            if step.layer == len(self._kinds) - 2:
                del self._shrinking[step.batch]
        return Inputs(weights, hidden, cache, self._early(step), experts)

    def _is_shrinking(self, step: Step) -> bool:
        return self._shrinking.get(step.batch, (None, 0))[0] == step.token

    def _takes_cache(self, step: Step) -> bool:
        return self._plan.takes_cache(step.token, step.layer, step.batch)

    def _compute(self, step: Step, inputs: Inputs) -> Handle:
        """Dispatches one layer for one batch, and hands on the results that need no waiting."""
        computed = self._backend.compute(step, inputs)
        self._dispatched += 1
        if step.token > 0:
            self._prompting.discard(step.batch)
        if self._takes_cache(step):
            self._attending.add(step.batch)
            self._cached.release(step, self._dispatched)
        if self._kinds[step.layer] != "embedding":
            self._hidden.release(step, self._dispatched)
        if self._has_output(step):
            part = self._plan.hidden(step.token, step.layer, step.batch)
            self._states.put(step.token, part, computed)
        return computed

    def _has_output(self, step: Step) -> bool:
        """Returns whether another layer takes a step's hidden states."""
        is_head = self._kinds[step.layer] == "head"
        return not is_head and not self._plan.only_caches(step.token, step.layer)

    def _skip_to(self, step: Step) -> None:
        """Makes up for the tokens that were left out before a step's, in all batches that are as
        far as this one."""
        last = len(self._kinds) - 3  # counted from 0, without the embedding and the head
        if self._cache.has((last, step.batch), self._cached_tokens(step)):
            return
        until = self._cached_until[last, step.batch]
        batches = [n for n in self._going if self._cached_until.get((last, n)) == until]
        self._cache.skip({n: self._cached_tokens(step._replace(batch=n)) for n in batches})

    def _early(self, step: Step) -> tuple[Step, Handle] | None:
        """Returns the next batch's step and input, if its query can be computed while the CPU
        attends for this one."""
        if not self._plan.policy.overlap or not self._cache.asks_host(_where(step)):
            return None
        later = self._ahead.following()
        if later is None or later.visit != step.visit or later.token <= 0:
            return None
        if not self._is_waiting(later) or not self._cache.asks_host(_where(later)):
            return None
        return later, self._hidden.take(later)

    def _retire_latest(self, following: Step) -> None:
        """Waits for the step before `following`, which is the latest to be dispatched but for that
        one, so that the device stays busy; stores its results."""
        if self._latest is None:
            return
        (step, number, computed), self._latest = self._latest, None
        rows = self._backend.finish(step, computed)
        self._ring.finished = number
        if step.batch not in self._going:
            return  # it was dispatched before the batch was known to be done
        kind = self._kinds[step.layer]
        if kind == "head":
            if rows == 0 or step.token == self._last_token(step.batch):
                self._leave(step.batch, following)
            elif rows is not None and step.batch not in self._shrinking:
                self._wish_to_shrink(step, following, fewer_rows(rows))
            return
        if self._has_output(step):
            self._states.settle(step.token, step.layer, step.batch)
        if kind == "decoder":
            self._store_cache(step, computed)

    def _store_cache(self, step: Step, computed: Handle) -> None:
        """Stores a step's keys and values, if another step will attend to them."""
        if step.token == self._last_token(step.batch):
            return
        where = _where(step)
        if step.token <= 0:
            self._cache.put_prompt(step.token, where, computed)
        else:
            self._cache.put_token(where, computed)
        self._cached_until[where] = step.token

    def _wish_to_shrink(self, step: Step, following: Step, rows: int) -> None:
        """Leaves a batch with fewer rows from its next token on, or, if that has begun, from the
        one after it on."""
        token = step.token + 1 + (following.batch == step.batch)
        is_smaller = rows < self._plan.batches[step.batch].rows
        if is_smaller and token <= self._last_token(step.batch) and self._fits(step.batch):
            self._shrinking[step.batch] = token, rows
            self._cached.keep_only(lambda s: (s.batch, s.token) != (step.batch, token), 0)

    def _fits(self, batch: int) -> bool:
        """Returns whether there is room for what shrinking a batch takes for a moment."""
        if self._peaks is None:
            return True
        used, needed = self._ledger.used, self._cache.bytes_to_shrink(batch)
        return all(used[tier] + nbytes <= self._peaks[tier] for tier, nbytes in needed.items())

    def _last_token(self, batch: int) -> int:
        return max(self._tokens, default=self._plan.batches[batch].gen_len - 1)

    def _leave(self, batch: int, following: Step) -> None:
        """Drops a batch's other steps and their loads, and frees what it has."""
        self._going.discard(batch)
        self._live_rows -= self._plan.batches[batch].rows
        self._attending.discard(batch)
        self._prompting.discard(batch)
        self._shrinking.pop(batch, None)
        self._ahead.drop(batch)
        for stream in (self._cached, self._hidden):
            stream.keep_only(lambda step: step.batch != batch, self._dispatched)
        self._cache.leave(batch, self._dispatched)
        self._states.leave(batch)
        for layer in range(len(self._plan.spec.decoders)):
            self._cached_until.pop((layer, batch), None)
        self._backend.leave(batch)
        self._arrivals.leave(batch)
        if not self._plan.is_resident:
            self._forget_visits(following)

    def _forget_visits(self, following: Step) -> None:
        """Ends the loads that only a batch which has left would have used."""
        steps = self._ahead.visits(following.visit - 1, self._plan.ahead.weight_reads + 1)
        wanted = {key[1]: key for step in reversed(steps) for key in self._keys(step)}
        visits = {step.visit for step in steps}
        self._weights.rename(lambda key: key if key[0] in visits else wanted.get(key[1], key))
        self._weights.keep_only(lambda key: key[0] in visits, self._dispatched)
        self._taken = {key: None for key in self._taken if key in self._weights}
        self._held.clear()
        self._read_for = self._copied_for = None  # other visits come next
        self._read_until = -1

    def _close(self) -> None:
        """Releases everything, also after an error or Ctrl-C, and even if one part of it fails."""
        with ExitStack() as parts:
            for part in (self._ring, self._cache, self._states, self._loader):
                parts.callback(part.close)
            for stream in (self._hidden, self._cached, self._weights):
                parts.callback(stream.close)


def fewer_rows(rows: int) -> int:
    """Returns the rows that a batch with `rows` unfinished rows may shrink to: one of few numbers,
    since programs are compiled for each, and fewer rows save more in a large batch."""
    bits = (rows - 1).bit_length()
    most = 1 << (bits + bits % 2 if bits < 4 else bits)
    is_large = most > ROWS_OF_A_LARGE_BATCH
    return most * 3 // 4 if is_large and rows <= most * 3 // 4 else most


def _where(step: Step) -> LayerBatch:
    return step.layer - 1, step.batch
