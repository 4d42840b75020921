"""Groups requests into padded batches and blocks of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexgen_jax.engine.sampling import SamplingParams

LENGTH_BUCKET = 16
"""Prompts are padded to a multiple of this, so that few shapes are compiled."""


@dataclass(frozen=True)
class Request:
    """One sequence to continue.

    max_tokens: the new tokens that its parameters ask for, limited by the room in the model's
    context; forced: tokens to continue it with, in order to score them.
    """

    index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    forced: tuple[int, ...] = ()


def padded_length(tokens: int, max_positions: int) -> int:
    """Returns the length rounded up to the next bucket, limited by the model's context, at least
    1."""
    return max(min(-(-tokens // LENGTH_BUCKET) * LENGTH_BUCKET, max_positions), 1)


def make_blocks(
    requests: Sequence[Request], batch_size: int, num_batches: int
) -> list[list[list[Request]]]:
    """Groups requests into blocks of batches, with requests of similar length together.

    The requests of the last block are spread evenly over as few batches as hold them.
    """
    ordered = sorted(requests, key=lambda r: (len(r.prompt_ids), len(r.forced), r.index))
    per_block = batch_size * num_batches
    blocks = []
    for start in range(0, len(ordered), per_block):
        members = ordered[start : start + per_block]
        count = -(-len(members) // batch_size)
        size = -(-len(members) // count)
        blocks.append([members[i : i + size] for i in range(0, len(members), size)])
    return blocks


def pad_prompts(
    batch: Sequence[Request], rows: int, pad_id: int, max_positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns left-padded ids, int32 [rows, token], and the index of each row's first real token,
    int32 [rows].

    Rows beyond the batch count as one padding token, so that all batches of a block have equal
    shapes.
    """
    tokens = padded_length(max(len(r.prompt_ids) for r in batch), max_positions)
    ids = np.full((rows, tokens), pad_id, np.int32)
    first_valid = np.full(rows, tokens - 1, np.int32)
    for row, request in enumerate(batch):
        first_valid[row] = tokens - len(request.prompt_ids)
        ids[row, first_valid[row] :] = request.prompt_ids
    return ids, first_valid
