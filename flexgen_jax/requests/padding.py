"""Prompts as left-padded arrays of few lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexgen_jax.requests.requests import EncodedRequest

LENGTH_BUCKET = 16
"""Prompts are padded to a multiple of this, so that few shapes are compiled."""


def padded_length(tokens: int, max_positions: int) -> int:
    """Returns the length rounded up to the next bucket, limited by the model's context, at least
    1."""
    return max(min(-(-tokens // LENGTH_BUCKET) * LENGTH_BUCKET, max_positions), 1)


def pad_prompts(
    batch: Sequence[EncodedRequest], rows: int, pad_id: int, max_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns left-padded ids of prompts without their prefix, int32 [rows, token], and the index
    of each row's first real token, int32 [rows].

    Rows beyond the batch count as one padding token, so that all batches of a block have equal
    shapes.
    """
    before, longest = min(r.prefix_len for r in batch), max(len(r.own_ids) for r in batch)
    tokens = padded_length(longest, max_positions - before)
    if before and longest < LENGTH_BUCKET:  # such as the last token of a prompt of several texts
        tokens = min(tokens, 1 << (longest - 1).bit_length())
    ids = np.full((rows, tokens), pad_id, np.int32)
    first_valid = np.full(rows, tokens - 1, np.int32)
    for row, request in enumerate(batch):
        first_valid[row] = tokens - len(request.own_ids)
        ids[row, first_valid[row] :] = request.own_ids
    return ids, first_valid
