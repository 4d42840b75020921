"""Profiles of known machines, to plan without having them, and one for runs too short to measure.

`t4-16gb` has the constants that the paper's authors published for their machine and runtime. Other
machines are data sheet figures, times the shares that large matmuls and copies reach. None was
measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flexgen_jax.policy.hardware import HardwareProfile, KernelSizes, ProfileError, Rate

GB = 10**9
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


def _t4() -> HardwareProfile:
    """Returns the profile of the FlexGen paper's machine.

    Memory and disk are those of section 6 and table 24, bandwidths and FLOP/s those of appendix A.3
    as published with the paper's code. The authors' model adds copies to the GPU to compute time,
    hence the drag. The paper has no figure for reading weights in products of few rows, taken to be
    260 GB/s, nor for the rates of 4 bits, which are fitted to its results with compression
    (docs/policy.md).
    """
    bmm, cpu = 0.079e12 / 2, 0.0123e12 / 2  # two operations for each element of keys and values
    full = Rate(((1, 0.26e12), (2, 0.52e12), (16, 3.6e12), (48, 4.3e12), (1024, 21.24e12)))
    return HardwareProfile(
        name="t4-16gb",
        dtype="float16",
        device_memory=15 << 30,
        host_memory=204 << 30,
        disk_space=1500 << 30,
        unified=False,
        disk_read=Rate.constant(1.6 * GB),
        disk_write=Rate.constant(1.3 * GB),
        page_cache=Rate.constant(5.0 * GB),
        host_to_device=Rate.constant(12.89 * GB),
        device_to_host=Rate.constant(0.97 * GB),
        linear={16: full, 8: _unpacked(full, T4_UNPACK), 4: _unpacked(full, T4_UNPACK)},
        prefill_attention=Rate.constant(9.97e12),
        device_attention={
            16: Rate.constant(bmm),
            8: Rate.constant(1 / (1 / bmm + 1 / T4_UNPACK_KV)),
            4: Rate.constant(1 / (1 / bmm + 1 / T4_UNPACK_KV)),
        },
        host_attention=dict.fromkeys((16, 8, 4), Rate.constant(cpu)),
        quantize=Rate.constant(10e9),
        device_rank=Rate.constant(5e9),
        host_rank=Rate.constant(0.3e9),
        step_s=0.0001,
        split_s=0.0003,
        drag={"host_to_device": 1.0},
        sizes=replace(KernelSizes.of_gpu(), unpacks_layers=False),  # as the fitted rates have it
        about={"source": "FlexGen paper, section 6, tables 21 and 24, and its published constants"},
    )


T4_UNPACK, T4_UNPACK_KV = 8.5e9, 27e9
"""Elements of weights, and of KV cache, that the paper's runtime unpacks per second on a T4."""


def _unpacked(full: Rate, unpack: float) -> Rate:
    """Returns the FLOP/s of products whose kernels are unpacked first.

    full: FLOP/s without unpacking; unpack: elements that are unpacked per second.
    """
    points = ((rows, 2 * rows / (1 / unpack + 2 * rows / full.at(rows))) for rows in ROWS)
    return Rate(tuple((float(rows), rate) for rows, rate in points))


FEW_ROWS, PACKED_ROWS = 2, 64
"""Maximum rows for which GPU kernels multiply packed weights row by row, and by tensor cores."""

GROUP_BITS = 0.5
"""Bits of the scales of a group, for each of its numbers."""


class Instructions(NamedTuple):
    """Instructions of the compiled kernels: for a packed weight that is multiplied row by row, for
    each row of these, for a weight that the matrix units multiply, and for a number of a packed KV
    cache."""

    weight: float = 4.1
    row: float = 1.7
    tiled: float = 10.8
    cached: float = 10.3


AMPERE, HOPPER = Instructions(), Instructions(tiled=6.5, cached=9.6)
"""Those of an A100 and of cards like it, and of an H100, whose matrix units take weights from
registers and rows from shared memory."""


def _packed(plain: Rate, bits: int, read: float, issued: float, cost: Instructions) -> Rate:
    """Returns the FLOP/s of matmuls with packed weights: packed up to `PACKED_ROWS` rows, as
    `plain` beyond.

    read: byte/s; issued: instructions of a second. Reading or computing counts, whichever takes
    longer.
    """

    def rate(rows: float) -> float:
        by_rows = cost.weight + cost.row * rows
        at_rate = by_rows if rows <= FEW_ROWS else cost.tiled
        weights = min(8 * read / (bits + GROUP_BITS), issued / at_rate)
        return max(2 * rows * weights, plain.at(rows))

    return Rate(tuple((n, rate(n) if n <= PACKED_ROWS else other) for n, other in plain.points))


def _cached(bits: int, read: float, issued: float, cost: Instructions) -> Rate:
    """Returns the elements of a packed KV cache that a token attends to in a second; see
    `_packed`."""
    return Rate.constant(min(8 * read / (bits + GROUP_BITS), issued / cost.cached))


def _gpu(
    name: str,
    device_memory: float,
    host_memory: float,
    disk_space: float,
    link: float,
    bandwidth: float,
    flops: float,
    issued: float,
    host_bandwidth: float,
    disk: tuple[float, float],
    cost: Instructions = AMPERE,
) -> HardwareProfile:
    """Returns a profile from a data sheet.

    device_memory, host_memory, disk_space: GB; link, bandwidth, host_bandwidth: byte/s; flops:
    dense 16-bit FLOP/s; issued: instructions of threads that begin in a second, 128 for each clock
    of a multiprocessor; disk: GB/s of reading and writing; cost: of the kernels. Matmuls reach 0.6
    of the FLOP/s, memory reads and copies 0.8 of the bandwidth, CPU attention half of it, the CPU's
    products of few rows 0.6 of it.
    """
    read = 0.8 * bandwidth
    full = Rate(tuple((float(rows), min(rows * read, 0.6 * flops)) for rows in ROWS))
    unpack = read / 3  # half a byte read, and two bytes written and read again
    return HardwareProfile(
        name=name,
        dtype="bfloat16",
        device_memory=int(device_memory * GB),
        host_memory=int(host_memory * GB),
        disk_space=int(disk_space * GB),
        unified=False,
        disk_read=Rate.constant(disk[0] * GB),
        disk_write=Rate.constant(disk[1] * GB),
        page_cache=Rate.constant(8 * GB),
        host_to_device=Rate(((1e4, 0.1 * link), (1e7, 0.8 * link))),
        device_to_host=Rate(((1e4, 0.1 * link), (1e7, 0.8 * link))),
        linear={16: full}
        | {bits: _packed(_unpacked(full, unpack), bits, read, issued, cost) for bits in (8, 4)},
        prefill_attention=Rate.constant(0.1 * flops),
        device_attention={16: Rate.constant(read / 2)}
        | {bits: _cached(bits, read, issued, cost) for bits in (8, 4)},
        host_attention={
            16: Rate.constant(host_bandwidth / 4),
            8: Rate.constant(host_bandwidth / 3),
            4: Rate.constant(host_bandwidth / 3),
        },
        quantize=Rate.constant(read / 8),
        device_rank=Rate.constant(read / 40),
        host_rank=Rate.constant(host_bandwidth / 100),
        step_s=0.0002,
        split_s=0.0003,
        host_linear={bits: _on_host(bits, host_bandwidth) for bits in (16, 8, 4)},
        host_read=host_bandwidth,
        sizes=KernelSizes.of_gpu(),
        about={"source": "data sheets, not measured"},
    )


HOST_FLOPS = 0.8e12
"""FLOP/s that the CPU's products reach next to a GPU: a guess for eight to sixteen cores with
vectors of 512 bits."""


def _on_host(bits: int, bandwidth: float) -> Rate:
    """Returns the FLOP/s of the CPU's products with weights in host memory, by rows."""
    weight_bits = bits if bits == 16 else bits + GROUP_BITS
    read = 0.6 * bandwidth * 8 / weight_bits
    return Rate(tuple((float(rows), min(2 * rows * read, HOST_FLOPS)) for rows in ROWS))


def _generic_cpu() -> HardwareProfile:
    """Returns an assumed profile without a GPU: memory at 10 GB/s, matmul at 500 GFLOP/s, and
    further rates in the proportions of a measured Xeon with two cores."""
    full = Rate(((1, 10e9), (16, 150e9), (64, 300e9), (512, 500e9)))
    packed = Rate(((1, 7e9), (16, 60e9), (64, 200e9), (512, 500e9)))
    return HardwareProfile(
        name="generic-cpu",
        dtype="bfloat16",
        device_memory=16 * GB,
        host_memory=16 * GB,
        disk_space=100 * GB,
        unified=True,
        disk_read=Rate.constant(1.0 * GB),
        disk_write=Rate.constant(0.5 * GB),
        page_cache=Rate.constant(4.0 * GB),
        host_to_device=Rate.constant(3 * GB),
        device_to_host=Rate.constant(3 * GB),
        linear={16: full, 8: packed, 4: packed},
        prefill_attention=Rate(((128, 64e9), (512, 170e9), (1024, 200e9))),
        device_attention={16: Rate.constant(7e9), 8: Rate.constant(6e9), 4: Rate.constant(6e9)},
        host_attention={16: Rate.constant(5e9), 8: Rate.constant(4.5e9), 4: Rate.constant(4.5e9)},
        quantize=Rate.constant(1e9),
        device_rank=Rate.constant(0.02e9),
        host_rank=Rate.constant(0.1e9),
        step_s=0.0003,
        split_s=0.0005,
        drag={"disk_read": 0.2, "page_cache": 0.75},
        slowed={"disk_read": 1.1, "page_cache": 1.4},
        about={"source": "an assumption"},
    )


MACHINES: dict[str, Callable[[], HardwareProfile]] = {
    "t4-16gb": _t4,
    "rtx3060-12gb": lambda: _gpu(
        "rtx3060-12gb", 12, 64, 1000, 32 * GB, 360 * GB, 51e12, 6.4e12, 45 * GB, (3.0, 2.0)
    ),
    "rtx3090-24gb": lambda: _gpu(
        "rtx3090-24gb", 24, 125, 1000, 32 * GB, 936 * GB, 71e12, 17.8e12, 80 * GB, (1.6, 1.3)
    ),
    "rtx4090-24gb": lambda: _gpu(
        "rtx4090-24gb", 24, 128, 2000, 32 * GB, 1008 * GB, 165e12, 41.3e12, 80 * GB, (5.0, 3.0)
    ),
    "a5000-24gb": lambda: _gpu(
        "a5000-24gb", 24, 256, 2000, 32 * GB, 768 * GB, 111e12, 13.9e12, 150 * GB, (5.0, 3.0)
    ),
    "l4-24gb": lambda: _gpu(
        "l4-24gb", 24, 128, 2000, 32 * GB, 300 * GB, 121e12, 15.1e12, 150 * GB, (3.0, 2.0)
    ),
    "a100-80gb": lambda: _gpu(
        "a100-80gb", 80, 512, 2000, 32 * GB, 2039 * GB, 312e12, 19.5e12, 200 * GB, (3.0, 2.0)
    ),
    "h100-80gb": lambda: _gpu(
        "h100-80gb",
        80,
        1024,
        4000,
        64 * GB,
        3350 * GB,
        989e12,
        33.5e12,
        300 * GB,
        (6.0, 4.0),
        HOPPER,
    ),
    "h200-141gb": lambda: _gpu(
        "h200-141gb",
        141,
        1024,
        4000,
        64 * GB,
        4800 * GB,
        989e12,
        33.5e12,
        300 * GB,
        (6.0, 4.0),
        HOPPER,
    ),
    "generic-cpu": _generic_cpu,
}


def generic_machine(unified: bool) -> HardwareProfile:
    """Returns a profile to plan with where nothing is measured: a CPU's if it is the device, which
    is so where host and device are one RAM, or a GPU's."""
    return known_machine("generic-cpu" if unified else "rtx3090-24gb")


def known_machine(name: str) -> HardwareProfile:
    """Returns the profile of a named machine; raises `ProfileError` for an unknown name."""
    if name not in MACHINES:
        raise ProfileError(f"unknown hardware {name!r}; known: {', '.join(sorted(MACHINES))}")
    return MACHINES[name]()


def read_profile(name: str | Path) -> HardwareProfile:
    """Returns the profile of a named machine, or a profile from a file of `flexgen-jax profile`."""
    if str(name) in MACHINES:
        return known_machine(str(name))
    path = Path(name).expanduser()
    if not path.exists():
        names = ", ".join(sorted(MACHINES))
        raise ProfileError(f"hardware {name} is neither a file nor a known machine: {names}")
    try:
        return HardwareProfile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read {path}: {error}") from None
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None
