"""The blocks of GGUF's types of numbers (ggml's `ggml-common.h` and `ggml-quants.c`), taken apart
into codes and factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flexgen_jax.models.formats.format import Factor, Format, affine, centered
from flexgen_jax.models.formats.packing import packed_parts

NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Types of tensors by their numbers."""

SUPER = 256
"""Elements of a block of the K types."""

Taken = tuple[np.ndarray, list[np.ndarray]]
"""Codes, uint8 [row, element], and factors, each [row, group]; inner factors before the factors
that scale them."""


class Block(NamedTuple):
    """A type of blocks: how many elements one has, its bytes, the format of its numbers, and how
    uint8 [row, block, byte] is taken apart. Plain numbers have no format."""

    elements: int
    nbytes: int
    format: Format | None = None
    take: Callable[[np.ndarray], Taken] | None = None


def leaves_of(blocks: np.ndarray, kind: str) -> list[np.ndarray]:
    """Returns the leaves of rows of blocks, uint8 [row, byte]."""
    block = BLOCKS[kind]
    packing, take = block.format, block.take
    assert packing is not None and take is not None
    codes, factors = take(blocks.reshape(len(blocks), -1, block.nbytes))
    leaves = packed_parts(codes, packing)
    for (_, factor), values in zip(packing.factors, factors, strict=True):
        is_packed = factor.dtype == "codes"
        leaves += packed_parts(values, factor) if is_packed else [np.ascontiguousarray(values)]
    return leaves


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns the float16 at a byte of each block, [row, block]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _joined(codes: np.ndarray) -> np.ndarray:
    """Joins the parts of a row: [row, ...] becomes [row, element]."""
    return codes.reshape(len(codes), -1)


def _halves(stored: np.ndarray) -> np.ndarray:
    """Returns low halves of bytes and then high ones: [row, block, n] becomes [row, block, 2 n]."""
    return np.concatenate([stored & 15, stored >> 4], axis=-1)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Returns bit 4 of 32 codes, from four bytes of each block."""
    bits = np.unpackbits(blocks[:, :, at : at + 4], axis=2, bitorder="little")
    return bits << 4


def _q4_0(blocks: np.ndarray) -> Taken:
    return _joined(_halves(blocks[:, :, 2:])), [_half(blocks, 0)]


def _q4_1(blocks: np.ndarray) -> Taken:
    return _joined(_halves(blocks[:, :, 4:])), [_half(blocks, 0), _half(blocks, 2)]


def _q5_0(blocks: np.ndarray) -> Taken:
    codes = _halves(blocks[:, :, 6:]) | _fifth_bits(blocks, 2)
    return _joined(codes), [_half(blocks, 0)]


def _q5_1(blocks: np.ndarray) -> Taken:
    codes = _halves(blocks[:, :, 8:]) | _fifth_bits(blocks, 4)
    return _joined(codes), [_half(blocks, 0), _half(blocks, 2)]


def _q8_0(blocks: np.ndarray) -> Taken:
    return _joined(blocks[:, :, 2:] ^ np.uint8(0x80)), [_half(blocks, 0)]


def _mxfp4(blocks: np.ndarray) -> Taken:
    return _joined(_halves(blocks[:, :, 1:])), [blocks[:, :, 0]]


def _scales_and_minima(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns 8 scales and 8 minima of 6 bits from 12 bytes of each block: the first four scales
    and minima are the low bits of eight bytes; the top bits belong to the last four."""
    scale, minimum, top_bits = stored[:, :, :4], stored[:, :, 4:8], stored[:, :, 8:]
    scales = np.concatenate([scale & 63, (top_bits & 15) | (scale >> 6) << 4], axis=2)
    minima = np.concatenate([minimum & 63, (top_bits >> 4) | (minimum >> 6) << 4], axis=2)
    return _joined(scales), _joined(minima)


def _quarters(stored: np.ndarray) -> np.ndarray:
    """Returns codes of 4 bits in chunks of 64: [row, block, 128] becomes [row, block, 256]."""
    chunks = stored.reshape(*stored.shape[:2], 4, 32)
    return _halves(chunks).reshape(*stored.shape[:2], SUPER)


def _q4_k(blocks: np.ndarray) -> Taken:
    scales, minima = _scales_and_minima(blocks[:, :, 4:16])
    codes = _quarters(blocks[:, :, 16:])
    return _joined(codes), [scales, _half(blocks, 0), minima, _half(blocks, 2)]


def _q5_k(blocks: np.ndarray) -> Taken:
    scales, minima = _scales_and_minima(blocks[:, :, 4:16])
    high_bits = blocks[:, :, 16:48]
    fifth = np.stack([(high_bits >> n & 1) << 4 for n in range(8)], axis=2)  # 8 chunks of 32
    codes = _quarters(blocks[:, :, 48:]) | fifth.reshape(*fifth.shape[:2], SUPER)
    return _joined(codes), [scales, _half(blocks, 0), minima, _half(blocks, 2)]


def _q6_k(blocks: np.ndarray) -> Taken:
    low_bits = blocks[:, :, :128].reshape(
        *blocks.shape[:2], 2, 2, 32
    )  # half, byte's number, element
    high_bits = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    halves = [
        low_bits & 15,
        low_bits >> 4,
    ]  # 64 elements of a half from the low bits, 64 from the high ones
    upper = [
        np.concatenate([(high_bits >> n) & 3, (high_bits >> (n + 2)) & 3], axis=3) for n in (0, 4)
    ]
    codes = np.concatenate([p | u << 4 for p, u in zip(halves, upper, strict=True)], axis=3)
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8)
    return _joined(codes), [_joined(scales), _half(blocks, 208)]


def _two_bits(stored: np.ndarray) -> np.ndarray:
    """Returns codes of 2 bits: each half of a block has four parts of 32 in 32 bytes."""
    halves = stored.reshape(*stored.shape[:2], 2, 1, 32)
    return np.concatenate([(halves >> shift) & 3 for shift in (0, 2, 4, 6)], axis=3)


def _q2_k(blocks: np.ndarray) -> Taken:
    packed_factors = blocks[:, :, :16]
    codes = _two_bits(blocks[:, :, 16:80])
    factors = [
        _joined(packed_factors & 15),
        _half(blocks, 80),
        _joined(packed_factors >> 4),
        _half(blocks, 82),
    ]
    return _joined(codes), factors


def _q3_k(blocks: np.ndarray) -> Taken:
    mask = blocks[:, :, :32]
    third = np.stack([(mask >> n) & 1 for n in range(8)], axis=2)  # 8 parts of 32
    low_bits = _two_bits(blocks[:, :, 32:96]).reshape(*third.shape)
    codes = low_bits | third << 2
    stored, top = blocks[:, :, 96:104], blocks[:, :, 104:108]
    lower = np.concatenate([stored & 15, stored >> 4], axis=2)
    upper = np.concatenate([(top >> (2 * n)) & 3 for n in range(4)], axis=2)
    return _joined(codes), [_joined(lower | upper << 4), _half(blocks, 108)]


_UNIT = Factor("float16", SUPER)
_SIX = Factor("codes", 32, bits=6, of=_UNIT)
_FOUR = Factor("codes", 16, bits=4, of=_UNIT)

BLOCKS: dict[str, Block] = {
    "F32": Block(1, 4),
    "F16": Block(1, 2),
    "BF16": Block(1, 2),
    "Q4_0": Block(32, 18, centered(4, 32, "float16"), _q4_0),
    "Q4_1": Block(32, 20, affine(4, 32, dtype="float16"), _q4_1),
    "Q5_0": Block(32, 22, centered(5, 32, "float16"), _q5_0),
    "Q5_1": Block(32, 24, affine(5, 32, dtype="float16"), _q5_1),
    "Q8_0": Block(32, 34, centered(8, 32, "float16"), _q8_0),
    "Q2_K": Block(SUPER, 84, Format(2, _FOUR, minimum=_FOUR, subtracts=True), _q2_k),
    "Q3_K": Block(
        SUPER,
        110,
        Format(3, Factor("codes", 16, bits=6, center=32, of=_UNIT), center=4),
        _q3_k,
    ),
    "Q4_K": Block(SUPER, 144, Format(4, _SIX, minimum=_SIX, subtracts=True), _q4_k),
    "Q5_K": Block(SUPER, 176, Format(5, _SIX, minimum=_SIX, subtracts=True), _q5_k),
    "Q6_K": Block(SUPER, 210, Format(6, Factor("int8", 16, of=_UNIT), center=32), _q6_k),
    "MXFP4": Block(32, 17, Format(4, Factor("e8m0", 32), levels="e2m1"), _mxfp4),
    "IQ1_S": Block(SUPER, 50),
    "IQ1_M": Block(SUPER, 56),
    "IQ2_XXS": Block(SUPER, 66),
    "IQ2_XS": Block(SUPER, 74),
    "IQ2_S": Block(SUPER, 82),
    "IQ3_XXS": Block(SUPER, 98),
    "IQ3_S": Block(SUPER, 110),
    "IQ4_NL": Block(32, 18),
    "IQ4_XS": Block(SUPER, 136),
    "TQ1_0": Block(SUPER, 54),
    "TQ2_0": Block(SUPER, 66),
}
"""The types that are read. Those without a format are decoded when they are read."""

PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
"""Types of plain numbers, and how safetensors names them."""


def decoded_by_package(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Returns rows of blocks, uint8 [row, byte], as fp32; raises `ImportError` without the package
    `gguf`, which knows the codebooks of these types."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    numbers: np.ndarray = dequantize(blocks, getattr(GGMLQuantizationType, kind))
    return numbers
