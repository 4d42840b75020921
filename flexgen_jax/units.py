"""Sizes in bytes and other numbers as people write them, such as "16GB" or 87,800."""

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

    An integer is a number of bytes already, and None stays None. name: the quantity's name.
    Raises `UserError` for a text that is not a size.
    """
    if size is None or isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", size.upper())
    if match is None or match[2] not in _UNITS:
        what = f"{name}: " if name else ""
        raise UserError(f"{what}{size!r} is not a size; write it like 16GB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def significant(value: float) -> str:
    """Returns a number with three significant digits and without an exponent.

    >>> [significant(x) for x in (0.01234, 8.7654, 87.0, 87842.0)]
    ['0.0123', '8.77', '87', '87,800']
    """
    if abs(value) < 999.5:
        return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.6f}"
    digits = 3 - len(str(int(abs(value))))
    return f"{round(value, digits):,.0f}"


def scaled(value: float) -> str:
    """Returns a large number with a letter for its thousands, as of bytes.

    >>> [scaled(x) for x in (1.03e12, 7.5e10, 6.7e9, 1.25e8)]
    ['1.03 T', '75 G', '6.7 G', '125 M']
    """
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g} {letter}"
    return f"{value:.3g} "
