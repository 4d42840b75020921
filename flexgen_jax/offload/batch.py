"""The computed parts of a batch, and the sources of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from flexgen_jax.layers.rotary import Branches, Rows
from flexgen_jax.models.parts import Pooling
from flexgen_jax.offload.disk.kv_pieces import StoredSequence
from flexgen_jax.offload.disk.records import Records
from flexgen_jax.offload.speculation import DraftedTexts
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.segments import Segment
from flexgen_jax.schedule.arrivals import Planned
from flexgen_jax.schedule.running import Running
from flexgen_jax.schedule.stages import Slots
from flexgen_jax.schedule.waves import Arrivals, Step


@dataclass(frozen=True)
class Batch:
    """The input of one batch."""

    # int32 [batch, token], left-padded.
    ids: np.ndarray
    # int32 [batch], the index of each sequence's first real token.
    first_valid: np.ndarray
    # The arguments of `layers.sampling.sample` except the logits and the token; () for greedy
    # decoding.
    sampling: tuple[np.ndarray, ...] = ()
    # int32 [batch, token] to score the prompt against, instead of generating or, with
    # `prompt_logprobs`, besides.
    targets: np.ndarray | None = None
    # How many of the likeliest tokens are returned with the log-probability of each target.
    prompt_logprobs: int | None = None
    # How the prompts' last hidden states become vectors, None if they do not.
    pooling: Pooling | None = None
    # int32 [batch, generated token] to score and to continue with.
    forced: np.ndarray | None = None
    # int32 [batch], the tokens of each prompt and the most that follow.
    most: np.ndarray | None = None
    # int32 [batch], the tokens of the prefixes before each prompt, None where there are none.
    before: np.ndarray | None = None
    # int32 [batch], the number of each row's adapter, -1 for none; None stands for none.
    adapters: np.ndarray | None = None
    # Number of tokens returned with log-probabilities in addition to the chosen one, None for none.
    logprobs: int | None = None
    # A prefix's entry in the KV store, to be loaded; None if the prefix is computed.
    stored: StoredSequence | None = None
    # The continuation of each row; then only its tokens are scored.
    branches: Branches | None = None

    @property
    def size(self) -> int:
        return int(self.ids.shape[0])

    def taken(self, rows: Sequence[int]) -> Batch:
        """Returns the batch, reduced to the given rows."""
        index = np.array(rows)

        def some(array: np.ndarray | None) -> Any:
            return None if array is None else array[index]

        return replace(
            self,
            ids=some(self.ids),
            first_valid=some(self.first_valid),
            sampling=tuple(map(some, self.sampling)),
            targets=some(self.targets),
            forced=some(self.forced),
            most=some(self.most),
            before=some(self.before),
            adapters=some(self.adapters),
        )

    def tokens_before(self, row: int) -> int:
        """Returns how many tokens of prefixes are before a row's."""
        return 0 if self.before is None else int(self.before[row])

    @property
    def chooses(self) -> bool:
        """Whether the head chooses tokens."""
        is_scored = self.targets is not None and self.prompt_logprobs is None
        return not is_scored and self.forced is None

    @property
    def needs_prompt(self) -> bool:
        """Whether the head needs all tokens of the prompts."""
        return self.targets is not None or self.pooling in ("mean", "cls")

    @property
    def prompt_len(self) -> int:
        return int(self.ids.shape[1])

    @property
    def padding(self) -> list[int]:
        """How many tokens before each row's prompt need not be computed. A padding row, which has
        one token, counts like the previous row."""
        padding: list[int] = []
        max_lengths = np.full(self.size, 2) if self.most is None else self.most
        ends = 1 + (0 if self.branches is None else self.branches.total)
        for first, tokens in zip(self.first_valid.tolist(), max_lengths.tolist(), strict=True):
            is_padding = tokens == 1 and padding
            padding.append(padding[-1] if is_padding else min(first, self.prompt_len - ends))
        return padding


Guesses = Sequence[Sequence[int]]
"""Guessed tokens of each row of a batch, () where nothing is guessed."""


class BatchSource(Arrivals, Protocol):
    """The batches of a run."""

    def given(self, running: Running) -> Batch:
        """Return the computed parts of an admitted batch."""

    def keep(self, running: Running, rows: Sequence[int]) -> None:
        """Leaves a batch with these rows, in this order."""

    def adjusted(self, running: Running, guesses: Guesses = ()) -> tuple[np.ndarray, ...]:
        """Returns the sampling arguments of a batch's next tokens: arguments of
        `layers.sampling.adjust`, or (). guesses: draft tokens of each row; the sampling arguments
        of the tokens after them follow the row's."""

    def allowed(self, running: Running, guesses: Guesses = ()) -> np.ndarray | None:
        """Returns the allowed next tokens of a batch, see `layers.sampling.only_allowed`; None
        if all may. guesses: as for `adjusted`."""


class AllThere(Planned):
    """The batches of a plan, as a source; see `Source`."""

    def __init__(self, plan: BlockPlan, batches: Sequence[Batch]) -> None:
        super().__init__(plan)
        self._given: Mapping[Running, Batch] = dict(zip(self.batches, batches, strict=True))

    def given(self, running: Running) -> Batch:
        return self._given[running]

    def adjusted(self, running: Running, guesses: Guesses = ()) -> tuple[np.ndarray, ...]:
        return ()

    def allowed(self, running: Running, guesses: Guesses = ()) -> np.ndarray | None:
        return None

    def keep(self, running: Running, rows: Sequence[int]) -> None:
        self._given = {**self._given, running: self._given[running].taken(rows)}


class Neighbours(Protocol):
    """A stage's connection to the model's other stages; see `schedule.stages`."""

    @property
    def slots(self) -> Slots:
        """The steps that this stage has to compute."""

    def ids(self, step: Step) -> np.ndarray:
        """Returns the tokens that the last stage chose before a step, int32 [batch, 1]."""

    def receive(self, step: Step, rows: int, tokens: int) -> jax.Array:
        """Returns the hidden states of a step from the stage before, [batch, token, hidden]; waits
        for them."""

    def send(self, step: Step, hidden: jax.Array) -> None:
        """Hands a step's hidden states to the stage after this one."""


class HeadResult(NamedTuple):
    """The head's results for a step of a batch; arrays of the device, or NumPy's."""

    # int32 [batch x token, 1], the chosen tokens, -1 for none; None if given tokens are scored.
    ids: Any = None
    # Of the chosen tokens, see `layers.sampling.log_probabilities`; None if nobody asks for them.
    logprobs: tuple[Any, ...] | None = None
    # Of the given tokens, see `layers.programs.ends.score`; None if there are none.
    scores: tuple[Any, ...] | None = None
    # fp32 [batch, hidden], the prompts as vectors.
    pooled: Any = None


OnResult = Callable[[Step, HeadResult], Sequence[int] | None]
"""Receives a step and the head's result for it. Returns the rows that need more tokens, None for
all."""


class Moment(NamedTuple):
    """The place of a token in a batch's sequences."""

    # The index of the (first) new token.
    position: int
    # int32 [batch], each sequence's first valid token.
    first_valid: np.ndarray
    # Position and rows as arrays on the device.
    where: tuple[jax.Array, Rows]
    # For sparse attention, int32 [batch], how many earlier tokens each head attends to, by the
    # layers' window: on the host, and as arrays on the device.
    counts: Mapping[int | None, np.ndarray] | None = None
    counts_there: Mapping[int | None, jax.Array] | None = None

    def arguments(self, window: int | None) -> tuple[Any, ...]:
        """Returns the last arguments of the program `decode` for a layer with this window."""
        if self.counts_there is None:
            return self.where
        return (*self.where, self.counts_there[window])

    def first_seen(self, window: int | None) -> np.ndarray:
        """Returns the first token that the new one sees, int32 [batch]."""
        if window is None:
            return self.first_valid
        seen: np.ndarray = np.maximum(self.first_valid, np.int32(self.position + 1 - window))
        return seen


@dataclass
class Computed:
    """The results of a dispatched step."""

    # See `layers.programs.table.CHECKS`.
    checks: jax.Array
    # The layer's output.
    hidden: jax.Array | None = None
    # KV blocks, a token's cached arrays, ids or log-probabilities.
    result: Any = None
    # Whether the result is an open block that has the new token already.
    is_appended: bool = False
    # What the layer replaces with every token.
    replaced: tuple[jax.Array, ...] = ()


@dataclass(eq=False)
class BatchArrays:
    """A batch's runtime data: the payload of a `Running`."""

    given: Batch
    # Of the prompts, see `layers.groups`.
    segments: tuple[Segment, ...] = ()
    # On the device: positions, sampling arguments, and the latest tokens.
    rows: Rows | None = None
    sampling: tuple[jax.Array, ...] = ()
    ids: Any = None
    # Where passes have guesses, the texts, whose latest tokens are on the host.
    texts: DraftedTexts | None = None
    checks: Any = None
    # The rows that need more tokens, and those that the batch was left with last.
    left: Sequence[int] = ()
    taken: np.ndarray | None = None
    # Of the tokens that are next, by token.
    moments: dict[int, Moment] = field(default_factory=dict)
    # Of KV blocks on disk, by their rows and number: a record for each layer.
    files: dict[tuple[int, int], Records] = field(default_factory=dict)

    @property
    def placed(self) -> Rows:
        """Where the sequences are."""
        assert self.rows is not None, "the batch has been embedded"
        return self.rows


def arrays_of(running: Running) -> BatchArrays:
    """Returns a batch's runtime data."""
    arrays: BatchArrays = running.payload
    return arrays


def prompt_ids(running: Running, row: int) -> list[int]:
    """Returns the token ids of a row's prompt, prefixes included."""
    prefixes = running.prefixes_of(row)
    before = prompt_ids(prefixes[-1], 0) if prefixes else []
    batch = arrays_of(running).given
    return [*before, *batch.ids[row, batch.first_valid[row] :].tolist()]
