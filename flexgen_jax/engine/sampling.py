"""How the next token is chosen and when a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexgen_jax.models.defaults import SamplingDefaults


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Temperature, top_k and top_p are as the model's folder wants (generation_config.json) where they
    are None, and greedy if it has no wish. A temperature of 0 is greedy; top_k 0 and top_p 1
    exclude no token. The `stop` strings end a
    sequence and are not part of its text. Its random draws depend only on `seed` and on the
    request's place in the call, whatever else runs beside it. With `ignore_eos`, the end token does
    not end a sequence.
    """

    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop: Sequence[str] = ()
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens!r}")
        temperature, top_k = self.temperature, self.top_k
        if temperature is not None and not (temperature >= 0 and np.isfinite(temperature)):
            raise ValueError(f"temperature must be 0 or more, not {temperature!r}")
        if top_k is not None and (not isinstance(top_k, int) or top_k < 0):
            raise ValueError(f"top_k must be 0 (off) or more, not {top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError("stop strings must not be empty")

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn, rather than the likeliest ones taken."""
        return bool(self.temperature)

    def with_defaults(self, defaults: SamplingDefaults) -> SamplingParams:
        """Returns parameters that are all set. Who sets the temperature chooses without the
        folder's top_k and top_p."""
        if self.temperature is not None:
            defaults = SamplingDefaults(self.temperature)
        return replace(
            self,
            temperature=defaults.temperature,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
        )


def sampling_arrays(
    params: Sequence[SamplingParams], indices: Sequence[int]
) -> tuple[np.ndarray, ...]:
    """Returns the arguments of `layers.sampling.sample` for a batch, or () if all rows are greedy.

    They are temperature fp32 [batch], top_k int32 [batch], top_p fp32 [batch] and the requests'
    random keys uint32 [batch, 2].
    """
    if not any(p.is_sampled for p in params):
        return ()
    keys = [
        np.random.SeedSequence([p.seed & (2**64 - 1), index]).generate_state(2, np.uint32)
        for p, index in zip(params, indices, strict=True)
    ]
    return (
        np.array([p.temperature or 0 for p in params], np.float32),
        np.array([p.top_k or 0 for p in params], np.int32),
        np.array([1 if p.top_p is None else p.top_p for p in params], np.float32),
        np.stack(keys),
    )
