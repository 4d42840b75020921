"""Group-wise quantization in NumPy, written from its formula (FlexGen, section 5)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def rounded(x: np.ndarray, dtype: Any, up: bool) -> np.ndarray:
    """Rounds float32 numbers up, or else down, to numbers of `dtype`."""
    with np.errstate(over="ignore"):
        near, towards = x.astype(dtype), np.asarray(np.inf if up else -np.inf, dtype)
        beyond = np.nextafter(near, towards)
    wide = near.astype(np.float32)
    wrong = wide < x if up else wide > x
    return np.where(wrong, beyond, near)


def quantized(
    x: np.ndarray, bits: int, group: int, axis: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes, scales and minima, computed group by group along `axis`."""
    kept = np.float16 if x.dtype == np.float16 else ml_dtypes.bfloat16
    top = 65504.0 if x.dtype == np.float16 else float(np.finfo(np.float32).max) / 4
    wide = np.moveaxis(np.clip(x.astype(np.float32), -top, top), axis, 0)
    levels = 2**bits - 1
    codes, scales, minima = [], [], []
    for start in range(0, wide.shape[0], group):
        part = wide[start : start + group]
        low = rounded(part.min(0), kept, up=False)
        spread = (part.max(0) - low.astype(np.float32)) * np.float32(1 / levels)
        scale = rounded(spread, kept, up=True)
        step = scale.astype(np.float32)
        code = np.round((part - low.astype(np.float32)) / np.where(step > 0, step, np.float32(1)))
        codes.append(np.clip(code, 0, levels).astype(np.uint8))
        scales.append(scale)
        minima.append(low)
    whole = np.moveaxis(np.concatenate(codes), 0, axis)
    return whole, np.moveaxis(np.stack(scales), 0, axis), np.moveaxis(np.stack(minima), 0, axis)


def dequantized(x: np.ndarray, bits: int, group: int, axis: int) -> np.ndarray:
    """Returns x after quantization, fp32: minimum + scale * code."""
    codes, scale, minimum = quantized(x, bits, group, axis)

    def spread(values: np.ndarray) -> np.ndarray:
        each = np.repeat(values.astype(np.float32), group, axis=axis)
        return np.take(each, range(x.shape[axis]), axis=axis)

    return spread(minimum) + spread(scale) * codes.astype(np.float32)


def int8_product(
    x: np.ndarray,
    kernel: np.ndarray,
    largest: np.ndarray | None = None,
    rounded_kernel: np.ndarray | None = None,
) -> np.ndarray:
    """Returns x @ kernel.T by 8-bit integers (LLM.int8(), sections 2.1 and 3.2), fp64.

    x: [row, depth]; kernel: [column, depth]; largest: [column], the value of integer 127 in each
    row of the kernel (default: the row's largest absolute value); rounded_kernel: the kernel that
    outliers are multiplied with (default: `kernel`).
    """
    apart = ~(np.abs(x) < 6)
    codes, scale = _integers(np.where(apart, 0, x), None)
    kernel_codes, kernel_scale = _integers(kernel, largest)
    found = (codes @ kernel_codes.T) * np.outer(scale, kernel_scale)
    other = kernel if rounded_kernel is None else rounded_kernel
    return found + np.where(apart, x, 0).astype(np.float64) @ other.T.astype(np.float64)


def _integers(x: np.ndarray, largest: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    scale = (np.abs(x).max(1) if largest is None else largest).astype(np.float64) / 127
    return np.round(x.astype(np.float64) / np.where(scale > 0, scale, 1)[:, None]), scale
