"""Recognizes errors that mean running out of memory, and tells whose memory it was."""

from __future__ import annotations

from flexgen_jax.errors import MachineError


class OutOfMemoryError(MachineError, MemoryError):
    """A tier's memory ran out, and there is no smaller plan to continue with."""


def is_on_host(error: BaseException) -> bool:
    """Returns whether the host's memory ran out, pinned or not, rather than the device's."""
    error_text = str(error)
    if isinstance(error, MemoryError):
        return not error_text.startswith("device memory")
    return "pinned" in error_text or "host memory" in error_text


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means running out of memory, so that a smaller plan may help."""
    error_text = str(error)
    return (
        isinstance(error, MemoryError)
        or "RESOURCE_EXHAUSTED" in error_text
        or "Out of mem" in error_text
    )
