"""Recognizes errors that mean running out of memory, and tells whose memory it was."""

from __future__ import annotations

from flexgen_jax.errors import MachineError


class OutOfMemoryError(MachineError, MemoryError):
    """A tier's memory ran out, and there is no smaller plan to continue with."""


def is_on_host(error: BaseException) -> bool:
    """Returns whether the host's memory ran out, pinned or not, rather than the device's."""
    said = str(error)
    if isinstance(error, MemoryError):
        return not said.startswith("device memory")
    return "pinned" in said or "host memory" in said


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means running out of memory, so that a smaller plan may help."""
    said = str(error)
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "Out of mem" in said
