"""The head's results for the rows of a batch, on their way to the collector."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from flexgen_jax.offload.batch import BatchArrays, HeadResult, OnResult, prompt_ids
from flexgen_jax.offload.kv_keeper import KVKeeper
from flexgen_jax.offload.speculation import DraftedTexts
from flexgen_jax.schedule.waves import Step


class Results:
    """Passes the head's results on, one token per row at a time.

    keeper: of a KV store, which also receives the tokens; None without one.
    """

    def __init__(self, on_result: OnResult, keeper: KVKeeper | None) -> None:
        self._on_result, self._keeper = on_result, keeper

    def hand_on(self, step: Step, result: HeadResult) -> Sequence[int] | None:
        """Passes on the results of a head step; returns the rows that need more tokens,
        None where that is not known yet."""
        arrays: BatchArrays | None = step.batch.payload
        if arrays is None:
            return self._told(step, result)
        texts = arrays.texts
        unfinished_rows = (
            self._told(step, result) if texts is None else self._accept(step, texts, result)
        )
        if unfinished_rows is not None:
            arrays.left = unfinished_rows
        return unfinished_rows

    def _told(self, step: Step, result: HeadResult) -> Sequence[int] | None:
        """Passes on the head's result for one token per row; returns the rows that need more."""
        unfinished_rows = self._on_result(step, result)
        if (
            self._keeper is not None
            and unfinished_rows is not None
            and step.batch.payload is not None
        ):
            self._keeper.took(step.batch, result.ids, unfinished_rows)
        return unfinished_rows

    def _accept(self, step: Step, texts: DraftedTexts, result: HeadResult) -> Sequence[int] | None:
        """Passes on the accepted tokens of a pass: first tokens of all rows, then second tokens,
        and so on."""
        chosen_ids = result.ids.reshape(len(texts.rows), -1)
        places, cached = [range(1)] * len(texts.rows), 0
        if step.token <= 0:
            for row, text in enumerate(texts.rows):
                text.ids = prompt_ids(step.batch, row)  # prefixes are complete by now
        else:
            places, cached = texts.found(chosen_ids), step.batch.passes.cached
        unfinished_rows: Sequence[int] | None = range(len(texts.rows))
        for number in range(max(map(len, places))):
            rows = [row for row in unfinished_rows or () if number < len(places[row])]
            if not rows:
                break
            positions = np.zeros(len(texts.rows), int)
            positions[rows] = [row * chosen_ids.shape[1] + places[row][number] for row in rows]
            those = jax.tree.map(lambda x: x[positions], result)  # noqa: B023
            accepted_ids = those.ids
            accepted_ids[[row for row in range(len(positions)) if row not in rows]] = -1
            unfinished_rows = self._told(step, those)
            for row in rows:
                texts.rows[row].take(int(accepted_ids[row, 0]))
        texts.end_pass(
            cached, range(len(texts.rows)) if unfinished_rows is None else unfinished_rows
        )
        return unfinished_rows
