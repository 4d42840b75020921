"""Parses sizes in bytes as people write them, such as "16GB"."""

from __future__ import annotations

import re

from flexgen_jax.errors import UserError

_UNITS = {
    "": 1,
    **{"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    **{"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40},
}


def parse_bytes(size: str | int | None, name: str = "") -> int | None:
    """Returns a size in bytes: "16GB" is 16 * 10^9, "512MiB" is 512 * 2^20.

    An integer is a number of bytes already, and None stays None. name: of what has this size.
    Raises `UserError` for a text that is not a size.
    """
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", size.upper())
    if match is None or match[2] not in _UNITS:
        what = f"{name}: " if name else ""
        raise UserError(f"{what}{size!r} is not a size; write for example 16GB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])
