"""The weights of visits: weights shared by consecutive steps of a layer.

They are read from disk two visits ahead, copied to the device one visit ahead, and released after
the last step. Where few of a layer's experts are chosen, only those are loaded, when it is known
which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from flexgen_jax.policy.parts import WeightsPart
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.schedule.backend import ChosenExperts, ExpertLoads
from flexgen_jax.schedule.cache_blocks import CacheBlocks
from flexgen_jax.schedule.expert_cache import ExpertCache
from flexgen_jax.schedule.loads import Loader, PartLoad, Stream
from flexgen_jax.schedule.passes import Handle
from flexgen_jax.schedule.running import CachedPart, Running
from flexgen_jax.schedule.waves import LookAhead, Step

VisitPart = tuple[int, WeightsPart | CachedPart]
"""A visit, and its needs: a part of the weights, or a prefix's KV blocks. Where
nothing is ever loaded, 0 stands for all visits."""


class Held(NamedTuple):
    """The loads that steps of a visit compute with, see `Inputs`."""

    weights: list[Handle]
    prefixes: list[Handle]


class Visits:
    """Loads the weights of visits.

    going: the batches under way, kept by the loop; guessed_right, guessed_wrong: how many experts
    were loaded by guess, and then chosen or not.
    """

    def __init__(
        self,
        plan: BlockPlan,
        loader: Loader,
        ahead: LookAhead,
        cache: CacheBlocks,
        going: Sequence[Running],
    ) -> None:
        self._plan, self._loader, self._ahead = plan, loader, ahead
        self._cache, self._going = cache, going
        self._rates = plan.setting.experts
        self._has_experts = [layer.experts is not None for layer in plan.spec.layers]
        self._stream: Stream[VisitPart] = Stream(loader, self._start)
        # The visit's used loads, and the loads of equal steps.
        self._taken: dict[VisitPart, None] = {}
        self._held: dict[tuple[int, bool, tuple[Running, ...]], Held] = {}
        self._to_copy: deque[VisitPart] = deque()
        self._bytes_to_copy = self._steps_left = 0
        # The visits during which reads and copies were started, and the last visit read.
        self._read_for: int | None = None
        self._copied_for: int | None = None
        self._read_until = -1
        # The tokens of all batches that a pass computes, None if their rows may have changed.
        self._tokens: int | None = None
        # A visit, and how many tokens have chosen experts in it.
        self._routed = (-1, 0)
        # The experts of each layer that have to be loaded, by number.
        self._experts: dict[int, dict[int, WeightsPart]] = {}
        # Those that the steps of the visit have taken, to the device and on the host, and the visit
        # and the experts of a guess.
        self._chosen: dict[VisitPart, Handle] = {}
        self._on_host: dict[VisitPart, Handle] = {}
        self._guessed: tuple[int, set[int]] = (-1, set())
        self.guessed_right = self.guessed_wrong = 0
        # The experts of the visit that the cache had.
        self._hits = set[WeightsPart]()
        self.expert_cache = ExpertCache(plan.expert_cache_bytes, loader)

    def _start(self, key: VisitPart) -> PartLoad:
        part = key[1]
        if isinstance(part, CachedPart):
            tokens = part.state.running.shape.prompt_len
            return self._loader.start(self._cache.part(part.state, tokens))
        return self._loader.start_kept(part) if part.is_kept else self._loader.start(part)

    def _keys(self, step: Step) -> list[VisitPart]:
        """Returns a step's weights, without experts that are loaded on demand."""
        parts = self._plan.parts[step.layer]
        if self._loads_chosen(step):
            parts = tuple(part for part in parts if part.expert is None)
        visit = 0 if self._plan.is_resident else step.visit
        keys: list[VisitPart] = [(visit, part) for part in parts]
        return keys + [(visit, part) for part in step.batch.shared_parts(step.layer)]

    def take(self, step: Step) -> Held:
        """Returns the weights and the prefixes' KV blocks for all equal steps of a visit; the first
        of them takes them."""
        alike = (step.layer, self._loads_chosen(step), step.batch.prefixes)
        if alike not in self._held:
            keys = self._keys(step)
            self._taken |= dict.fromkeys(keys)
            held = Held([], [])
            for key in keys:
                is_prefix = isinstance(key[1], CachedPart)
                (held.prefixes if is_prefix else held.weights).append(self._stream.take(key))
            self._held[alike] = held
        return self._held[alike]

    def read_ahead(self, visit: int) -> None:
        """Starts prefetching the weights of the visits after `visit`."""
        if visit == self._read_for:
            return
        self._read_for = visit
        # Embedding and head are read once per batch group: while they compute, the disk continues
        # with what follows.
        for step in self._ahead.visits(visit, self._plan.ahead.weight_reads):
            if step.visit > self._read_until:
                self._read_until = step.visit
                for key in filter(_can_be_loaded, self._keys(step)):
                    self._stream.prefetch(key)

    def copy_ahead(self, step: Step) -> None:
        """Starts the copies to the device that are to travel while a step computes."""
        if step.visit != self._copied_for:
            copies = self._plan.ahead.weight_copies
            visits = self._ahead.visits(step.visit, copies, counts_all=True)
            keys = [key for later in visits for key in self._keys(later)]
            self._to_copy = deque(key for key in keys if not self._stream.is_copied(key))
            self._bytes_to_copy = sum(part.copied for _, part in self._to_copy)
            self._copied_for = step.visit
            self._steps_left = 1 + self._ahead.count_of(step.visit)
        if self._to_copy:
            self._copy_share()
        self._steps_left -= 1

    def _copy_share(self) -> None:
        """Starts the copies of the next visit's weights that travel during the coming step: an
        equal share of the bytes per step of this visit, in order of use, as far as they are
        read."""
        wanted = self._bytes_to_copy / self._steps_left
        while self._to_copy:
            nbytes = self._to_copy[0][1].copied
            if wanted <= 0 < nbytes or not self._stream.copy_if_read(self._to_copy[0]):
                break
            self._to_copy.popleft()
            self._bytes_to_copy -= nbytes
            wanted -= nbytes

    def release(self, step: Step, dispatched: int) -> None:
        """Releases a layer's weights after the last step of its visit, which is number `dispatched`
        of all steps, if they had to be loaded."""
        following = self._ahead.following()
        if following is not None and following.visit == step.visit:
            return
        for key in self._taken:
            if key in self._chosen and self._plan.expert_cache_bytes:
                self.expert_cache.keep(self._stream.hand_over(key), dispatched)
            else:
                self._stream.release(key, dispatched)
        self._taken.clear()
        self._held.clear()
        self._chosen.clear()
        self._on_host.clear()
        self._hits.clear()
        if self._has_experts[step.layer]:
            alone = self._experts[step.layer].values() if step.layer in self._experts else ()
            parts = (*self._plan.parts[step.layer], *alone)
            unchosen = {(step.visit, part) for part in parts if (step.visit, part) in self._stream}
            self.guessed_wrong += len(unchosen)
            self._stream.keep_only(lambda key: key not in unchosen, dispatched)

    def forget(self, following: Step, dispatched: int) -> None:
        """Ends the loads that only a batch which has left would have used; following: the next
        step."""
        steps = self._ahead.visits(following.visit - 1, self._plan.ahead.weight_reads + 1)
        wanted = {key[1]: key for step in reversed(steps) for key in self._keys(step)}
        visits = {step.visit for step in steps}
        self._stream.rename(lambda key: key if key[0] in visits else wanted.get(key[1], key))
        self._stream.keep_only(lambda key: key[0] in visits, dispatched)
        self._taken = {key: None for key in self._taken if key in self._stream}
        self._held.clear()
        self._chosen.clear()
        self._on_host.clear()
        self._guessed = (-1, set())
        self._read_for = self._copied_for = None  # other visits come next
        self._read_until = -1

    def forget_shared(self, running: Running) -> None:
        """Drops cached entries of a finished prefix, where nothing is ever loaded."""
        self._held = {key: held for key, held in self._held.items() if running not in key[2]}
        self._stream.keep_only(
            lambda key: not isinstance(key[1], CachedPart) or key[1].state.running is not running,
            after=0,
        )

    # Experts

    def _loads_chosen(self, step: Step) -> bool:
        """Returns whether experts are loaded only when a step has chosen them: if few will be, and
        no other batch is in its prompts, which choose nearly all. Batches that begin together leave
        their prompts together, too."""
        if step.token <= 0 or not self._has_experts[step.layer]:
            return False
        if not step.batch.is_in_prompt and any(running.is_in_prompt for running in self._going):
            return False
        if self._tokens is None:
            rows = sum(running.rows for running in self._going)
            self._tokens = rows * self._plan.policy.pass_tokens
        return self._rates.few_are_chosen(self._plan.spec.layers[step.layer], self._tokens)

    def count_rows(self) -> None:
        """Notes that batches have entered or left, or have fewer rows."""
        self._tokens = None

    def chosen(self, step: Step) -> ChosenExperts | None:
        """Returns how a step loads the experts that it chooses; None if all are loaded ahead."""
        experts = self._plan.spec.layers[step.layer].experts
        if experts is None or not self._loads_chosen(step):
            return None
        visit, before = self._routed
        rows = step.batch.rows * step.batch.span(step.token).tokens
        rows += before if visit == step.visit else 0
        self._routed = (step.visit, rows)
        later = next(iter(self._ahead.visits(step.visit, 1, counts_all=True)), None)
        guesses = later is not None and self._loads_chosen(later) and self._reads_experts(later)

        def load(numbers: Sequence[int], guessed: Collection[int]) -> ExpertLoads:
            away = self._experts_of(step)
            parts = [away[n] for n in numbers if n in away]
            hits = self._cached(step.visit, parts)
            keys: list[VisitPart] = [(step.visit, part) for part in parts if part not in hits]
            new_keys = [key for key in keys if not self._is_taken(key)]
            self.guessed_right += sum(key in self._stream for key in new_keys)
            for key in new_keys:  # all reads begin before any is waited for
                self._stream.prefetch(key)
            if guesses and later is not None:
                self._guess(later, guessed)
            self._taken |= dict.fromkeys(new_keys)
            num_copied = self._num_copied(len(new_keys))
            if self._plan.expert_cache_bytes:
                self.expert_cache.misses += num_copied
            for key in new_keys[:num_copied]:
                self._chosen[key] = self._stream.take(key)
            for key in new_keys[num_copied:]:
                self._on_host[key] = self._stream.take_on_host(key)
            return ExpertLoads(
                copied=[
                    *hits.values(),
                    *(self._chosen[key] for key in keys if key in self._chosen),
                ],
                on_host=[self._on_host[key] for key in keys if key in self._on_host],
            )

        expected = self._rates.chosen(self._plan.spec.layers[step.layer], rows)
        return ChosenExperts(
            load=load,
            guesses=guesses,
            away=self._experts_of(step),
            guessable=self._experts_of(later) if guesses and later is not None else (),
            uses_host=self._plan.host_experts > 0,
            most=min(experts.count, rows * experts.top),
            expected=round(expected),
            total=experts.count,
        )

    def _is_taken(self, key: VisitPart) -> bool:
        """Returns whether an earlier step of the visit has chosen an expert that was loaded."""
        return key in self._chosen or key in self._on_host

    def _cached(self, visit: int, parts: Sequence[WeightsPart]) -> dict[WeightsPart, Handle]:
        """Returns the loads of the chosen experts that the cache has, by part."""
        if not self._plan.expert_cache_bytes:
            return {}
        unknown = [part for part in parts if not self._is_taken((visit, part))]
        hits = {part: self.expert_cache.take(part) for part in unknown if part in self.expert_cache}
        self.expert_cache.hits += len(hits.keys() - self._hits)
        self._hits |= hits.keys()
        return hits

    def _num_copied(self, num_new: int) -> int:
        """Returns how many of the experts that a step is the first to choose in its visit are
        copied to the device; the CPU computes the others. The policy's share holds for all experts
        of the visit so far: rounding it at each step could copy more experts than were planned."""
        before = len(self._chosen)
        total = before + len(self._on_host) + num_new
        copied = total - round(self._plan.host_experts * total)
        return min(num_new, max(0, copied - before))

    def _reads_experts(self, step: Step) -> bool:
        """Returns whether some experts of a step's layer lie on disk."""
        return self._plan.policy.weights.disk > 0 and any(
            part.layouts for part in self._experts_of(step).values()
        )

    def _guess(self, step: Step, numbers: Collection[int]) -> None:
        """Starts to load the experts that a later step is guessed to choose."""
        visit, before = self._guessed
        known = before if visit == step.visit else set[int]()
        parts = self._experts_of(step)
        wanted = [n for n in numbers if n not in known and n in parts]
        for number in [n for n in wanted if parts[n] not in self.expert_cache]:
            self._stream.prefetch((step.visit, parts[number]))
        self._guessed = (step.visit, known.union(numbers))

    def _experts_of(self, step: Step) -> dict[int, WeightsPart]:
        """Returns the experts of a step's layer that are not on the device, by number."""
        layer = step.layer
        if layer not in self._experts:
            self._experts[layer] = self._plan.experts(layer)
        return self._experts[layer]

    def close(self) -> None:
        """Ends all loads."""
        self.expert_cache.close()
        self._stream.close()


def _can_be_loaded(key: VisitPart) -> bool:
    """Returns whether a visit's weights are available: weights, or a prefix that is computed."""
    part = key[1]
    return not isinstance(part, CachedPart) or part.state.until == -1
