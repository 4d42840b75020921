"""How running out of memory looks, and whose memory it was."""

from __future__ import annotations

from flexgen_jax.errors import UserError


class OutOfMemoryError(UserError, MemoryError):
    """A tier's memory ran out, and there is no smaller plan to go on with."""


def is_on_host(error: BaseException) -> bool:
    """Whether it was the host's memory that ran out, pinned or not, and not the device's."""
    said = str(error)
    if isinstance(error, MemoryError):
        return not said.startswith("device memory")
    return "pinned" in said or "host memory" in said


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller plan may help."""
    said = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "Out of mem" in said
