"""Times matmuls with kernel weights, next to the processor's peak and XLA's code.

    python scripts/benchmarks/products.py

Kernel weights are [8192, 2048], of 16 and of 4 bits. Beside each time stand its share of a loop of
fp32 products on two threads, and its share of the speed at which two threads read memory; both are
measured in the same run. XLA's code alternates with ours, and its time stands for both where runs
leave a product to it.

`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` hold our code to a smaller processor's units, as in
`NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c,+bmi,+bmi2`. XLA's matmuls use all
units of the processor regardless of these variables.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from flexgen_jax.cpu import features
from flexgen_jax.cpu.jit.llvm import LANES, filled
from flexgen_jax.cpu.jit.matmul_inner import added, cgutils
from flexgen_jax.cpu.jit.packing import FLOATS, Tiles
from flexgen_jax.cpu.processor import has_wide_vectors
from flexgen_jax.machine.product_probe import COLUMNS, DEPTH, time_products

THREADS = 2
SUMS = 12 if has_wide_vectors() else 6
TIMES = 20_000_000


@intrinsic
def _products(_context, count):  # type: ignore[no-untyped-def]
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        tiles, factor = Tiles(builder), filled(FLOATS, 0.999)
        sums = [cgutils.alloca_once_value(builder, filled(FLOATS, float(n))) for n in range(SUMS)]
        with tiles.loop(arguments[0]):
            for own in sums:
                found = builder.load(own)
                builder.store(added(tiles, found, factor, found), own)
        total = builder.load(sums[0])
        for own in sums[1:]:
            total = builder.fadd(total, builder.load(own))
        return tiles.sum_lanes(total)

    return types.float32(types.intp), generate


@njit(nogil=True)
def multiply(count):  # type: ignore[no-untyped-def]
    return _products(count)


@njit(nogil=True)
def read(numbers):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for index in range(numbers.size):
        total += numbers[index]
    return total


def best_s(work: Callable[[Any], Any], arguments: list[Any]) -> float:
    """Returns the seconds of the fastest of five runs of `work` on a thread for each argument."""
    found = []
    for _ in range(5):
        threads = [threading.Thread(target=work, args=(argument,)) for argument in arguments]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(time.perf_counter() - started)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 64, 16, 4, 1])
    args = parser.parse_args()
    multiply(1)
    read(np.zeros(1, np.uint64))
    flops = THREADS * TIMES * SUMS * LANES * 2
    peak = flops / best_s(multiply, [TIMES] * THREADS)
    arrays = [np.ones(1 << 26, np.uint64) for _ in range(THREADS)]
    memory = sum(array.nbytes for array in arrays) / best_s(read, arrays)
    print(f"units: {features()}; vectors of {512 if has_wide_vectors() else 256} bits")
    print(f"fp32 products {peak / 1e9:.0f} GFLOP/s; memory is read at {memory / 1e9:.1f} GB/s")
    print("| rows | bits | ms | of the products | of the memory | XLA ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for product in time_products(args.rows, turns=5):
        seconds = product.own_s or product.xla_s
        flops = 2 * product.rows * COLUMNS * DEPTH
        shares = flops / seconds / peak, product.nbytes / seconds / memory
        print(
            f"| {product.rows} | {product.bits} | {1e3 * seconds:.2f} | {shares[0]:.2f} "
            f"| {shares[1]:.2f} | {1e3 * product.xla_s:.2f} |"
        )


if __name__ == "__main__":
    main()
