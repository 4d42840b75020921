"""How the next token is chosen and when a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; the defaults are greedy.

    A temperature of 0 is greedy; top_k 0 and top_p 1 exclude no token. The `stop` strings end a
    sequence and are not part of its text. Its random draws depend only on `seed` and on the
    request's place in the call, whatever else runs beside it. With `ignore_eos`, the end token does
    not end a sequence.
    """

    max_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens!r}")
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature!r}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("stop strings must not be empty")


def sampling_arrays(
    params: Sequence[SamplingParams], indices: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """Returns the arguments of `layers.sampling.sample` for a batch, or () if all rows are greedy.

    They are temperature fp32 [batch], top_k int32 [batch], top_p fp32 [batch] and the requests'
    random keys uint32 [batch, 2].
    """
    if all(p.temperature == 0 for p in params):
        return ()
    keys = [
        np.random.SeedSequence([p.seed & (2**64 - 1), index]).generate_state(2, np.uint32)
        for p, index in zip(params, indices, strict=True)
    ]
    return (
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.stack(keys),
    )
