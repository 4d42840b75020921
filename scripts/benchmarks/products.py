"""Times matmuls with kernel weights, next to the processor's peak and XLA's code.

    python scripts/benchmarks/products.py

Kernel weights are [8192, 2048], of 16 and of 4 bits. Beside each time stand its share of a loop of
fp32 products on two threads, and its share of the speed at which two threads read memory; both are
measured in the same run. XLA's code alternates with ours, and its time stands for both where runs
leave a product to it.

`FLEXGEN_CPU_WITHOUT` holds our code to a smaller processor's units, as in
`FLEXGEN_CPU_WITHOUT=avx512f,amx-tile`. XLA's matmuls use all units of the processor regardless of
it.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import numpy as np

from flexgen_jax.cpu import features
from flexgen_jax.cpu.jit.emit import F32, I64, Function, Value
from flexgen_jax.cpu.jit.host_kernel import Arguments, HostKernel
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.processor import host
from flexgen_jax.machine.product_probe import COLUMNS, DEPTH, time_products

THREADS = 2
SUMS = 12 if host().has_wide_vectors else 6
TIMES = 20_000_000


def emit_products(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    """Multiplies and adds `TIMES` times, with sums that stay in registers."""
    sums = [k.variable(k.filled(F32, LANES, float(n))) for n in range(SUMS)]
    factor = k.filled(F32, LANES, 0.999)
    with k.loop(TIMES):
        for total in sums:
            total.set(k.fma(total.get(), factor, total.get()))
    for number, total in enumerate(sums):
        call.array(0, F32).store(number * LANES, total.get())


def emit_read(k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    """Reads numbers, and stores their sum in place of the first ones."""
    numbers, sums = call.array(0, I64), [k.variable(k.filled(I64, 8)) for _ in range(4)]
    with k.loop(call.index(1), step=32) as at:
        for n, total in enumerate(sums):
            total += numbers.load(at + 8 * n, 8)
    for n, total in enumerate(sums):
        numbers.store(8 * n, total.get())


def best_s(works: list[Callable[[int, int], None]]) -> float:
    """Returns the seconds of the fastest of five runs of some work, each on its own thread."""
    found = []
    for _ in range(5):
        threads = [threading.Thread(target=work, args=(0, 1)) for work in works]
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
    multiply, read = HostKernel("products", emit_products), HostKernel("read", emit_read)
    flops = THREADS * TIMES * SUMS * LANES * 2
    results = [np.empty(SUMS * LANES, np.float32) for _ in range(THREADS)]
    peak = flops / best_s([multiply.bind(result) for result in results])
    arrays = [np.ones(1 << 26, np.int64) for _ in range(THREADS)]
    reads = [read.bind(array, array.size) for array in arrays]
    memory = sum(array.nbytes for array in arrays) / best_s(reads)
    print(f"units: {features()}; vectors of {512 if host().has_wide_vectors else 256} bits")
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
