"""Formulations of plain JAX code that suit a backend. Results differ in rounding only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Choices between formulations that give one result; the defaults leave all to XLA.

    lanes: number of partial sums per row, for a backend that adds elements sequentially; 1 is a
        plain sum.
    kernel_first_rows: up to this many rows in 16 bits, a product has the kernel as its left
        operand, for a backend that copies the right one.
    doubles_lone_row: whether a single row in 16 bits is multiplied as two, for a backend that is
        slow with one.
    added_rows: up to this many rows are multiplied by packed weights element by element and added
        up, for a backend that would write the unpacked weights to memory for a product.
    has_barriers: whether a barrier separates unpacked arrays from the loops of later operations,
        for a backend that would unpack repeatedly inside them.
    keeps_cache_narrow: whether grouped queries are multiplied with keys and values in the dtype of
        these, with fp32 sums, for a backend that would write the cache to memory in fp32 first.
    turns_heads: whether the kernels of heads are copied with their inputs last for a product of
        several rows in 16 bits, for a backend that is slow with them in another order.
    orders_parts: whether a part of a kernel is unpacked only after the previous part's product, for
        a backend that would keep several unpacked parts in memory.
    """

    lanes: int = 1
    kernel_first_rows: int = 0
    doubles_lone_row: bool = False
    has_barriers: bool = False
    turns_heads: bool = False
    orders_parts: bool = False
    keeps_cache_narrow: bool = False
    added_rows: int = 0


PLAIN = Tuning()
