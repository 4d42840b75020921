"""Profiles of machines: rates as functions of size, fixed costs, memory. JSON, no JAX."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import exp, log
from statistics import median
from typing import Any, NamedTuple

from flexgen_jax.errors import UserError

PROFILE_VERSION = 8
"""Version of a profile's JSON; a cached profile of another version is measured again."""

NUM_DISK_RATES = 4
"""Number of the latest runs whose disk rates correct a profile."""

UNSTEADY = 1 / 3
"""Spread above which a profile is unreliable; it is more than machines have that are just busy."""

MEASURED, ASSUMED = "measured", "assumed from a few rates"
"""Sources of a profile of this machine."""

TRANSFERS = ("disk_read", "disk_write", "host_to_device", "device_to_host")


class ProfileError(UserError):
    """A profile that cannot be read or used; the message names the field and the way out."""


@dataclass(frozen=True)
class Rate:
    """Units per second as a function of an operation's size, by measured points.

    points: (size, units/s), sizes ascending; between them log(rate) is linear in log(size), and
    beyond them the rate is that of the nearest point. spread: for each point the interquartile
    range of its samples relative to their median; () where nothing was measured.
    """

    points: tuple[tuple[float, float], ...]
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(sizes) <= 0:
            raise ProfileError(f"a rate needs points with ascending, positive sizes, not {sizes}")
        if min(rate for _, rate in self.points) <= 0:
            raise ProfileError(f"a rate must be positive: {self.points}")

    @classmethod
    def constant(cls, rate: float) -> Rate:
        return cls(((1.0, rate),))

    def scaled(self, factor: float) -> Rate:
        """Returns the rate with all points this many times as fast."""
        return Rate(tuple((size, factor * rate) for size, rate in self.points), self.spread)

    def at(self, size: float) -> float:
        """Returns the units per second of an operation of this size."""
        points = self.points
        place = bisect_left(points, (size, 0.0))
        if place == 0:
            return points[0][1]
        if place == len(points):
            return points[-1][1]
        (low, first), (high, second) = points[place - 1], points[place]
        part = (log(size) - log(low)) / (log(high) - log(low))
        return exp(log(first) + part * (log(second) - log(first)))

    def seconds(self, units: float, size: float | None = None) -> float:
        """Returns the seconds of `units` at the rate of operations of `size` (default: units)."""
        return units / self.at(units if size is None else size) if units > 0 else 0.0


class DiskReads(NamedTuple):
    """Direct reads of a run: bytes, bytes per operation, and whether prompts were computed at the
    same time."""

    nbytes: float
    size: float
    is_prefill: bool


@dataclass(frozen=True)
class KernelSizes:
    """Amounts of work that a device's kernels take at once, which decide the size of temporaries.
    The defaults suit the caches of a CPU; `of_gpu` has those of a GPU.

    prefill_rows, packed_prefill_rows: tokens computed together in prefill, with weights in the
        dtype and with packed weights, which every group unpacks again.
    scored_rows: positions whose logits are computed together when texts are scored.
    score_bytes: bytes of fp32 attention scores that prefill has in memory at once.
    part_bytes: bytes of a kernel that are unpacked and multiplied together.
    unpacks_layers: whether a layer's weights in fewer bits are unpacked as a whole, once for all
        batches of a visit, if there are several.
    worth_compiling: multiplications with padding that take longer than it takes to compile the
        program without them.
    expert_rows: the fewest tokens that an expert computes at once.
    joined_layers: maximum decoder layers in one decode program, if their data is on the device.
    """

    prefill_rows: int = 1024
    packed_prefill_rows: int = 2048
    scored_rows: int = 256
    score_bytes: int = 16 << 20
    part_bytes: int = 16 << 20
    unpacks_layers: bool = False
    worth_compiling: int = 100 * 10**9
    expert_rows: int = 4
    joined_layers: int = 1

    @classmethod
    def of_gpu(cls) -> KernelSizes:
        """Returns amounts that keep a GPU's multiprocessors busy."""
        return cls(
            prefill_rows=4096,
            packed_prefill_rows=4096,
            scored_rows=4096,
            score_bytes=256 << 20,
            part_bytes=256 << 20,
            unpacks_layers=True,
            worth_compiling=200 * 10**12,
            expert_rows=16,
            joined_layers=8,
        )

    def prefill_sequences(self, batch: int, tokens: int, weight_bits: int) -> int:
        """Returns the number of a batch's sequences that prefill takes through a layer together."""
        rows = self.prefill_rows if weight_bits == 16 else self.packed_prefill_rows
        return max(1, min(batch, rows // tokens))

    def scored_heads(self, heads: int, tokens: int) -> int:
        """Returns the number of a batch's heads whose attention scores are in memory at once."""
        return max(1, min(heads, self.score_bytes // (4 * tokens * tokens)))

    def unpacked_bytes(self, rows: int, out: int) -> int:
        """Returns the bytes of an unpacked part of a kernel, for a product of shape [rows, out].

        A part is no smaller than the fp32 product, which is joined from the parts' products.
        """
        return max(self.part_bytes, 4 * rows * out)


@dataclass(frozen=True)
class HardwareProfile:
    """One machine, for models of one dtype. Sizes and rates of transfers are in bytes.

    device_memory, host_memory, disk_space: bytes. unified: host and device are one RAM, and one
        set of cores computes for both.
    disk_read, disk_write, page_cache, host_to_device, device_to_host: bytes -> byte/s;
        page_cache is the reading of files that the operating system has in RAM.
    linear: by bits of the weights, rows -> FLOP/s of a layer's products, norms included.
    linear_int8: by bits of the weights, rows -> FLOP/s of a layer's products of 8-bit integers;
        bits that are missing take the rate of `linear`.
    prefill_attention: tokens of a prompt -> FLOP/s.
    device_attention, host_attention: by bits of the cache, elements of the keys and values of a
        step -> element/s of decoding, if the device, or the CPU, attends.
    quantize: elements of a KV block -> element/s.
    device_rank, host_rank: attention scores of a step -> score/s of finding the largest.
    step_s: fixed seconds of a step; split_s: further seconds if the CPU attends.
    disk_range: the slowest and the fastest rates of direct reads that were seen, relative to
        `disk_read`.
    drag: by transfer, the seconds of computing that are lost for one second of the transfer.
    slowed: by transfer, its slowdown during compute.
    prefill_drag, prefill_slowed: the same for prefill, where it differs from decoding.
    host_linear: by bits of the weights, rows -> FLOP/s of products that the CPU computes next to a
        GPU, from weights in host memory; empty if it does not.
    host_read: byte/s of reading host memory, which products of the CPU and copies share; 0 if it is
        not known.
    sizes: amounts of work that the device's kernels take at once.
    about: where the figures come from.
    """

    name: str
    dtype: str
    device_memory: int
    host_memory: int
    disk_space: int
    unified: bool
    disk_read: Rate
    disk_write: Rate
    page_cache: Rate
    host_to_device: Rate
    device_to_host: Rate
    linear: dict[int, Rate]
    prefill_attention: Rate
    device_attention: dict[int, Rate]
    host_attention: dict[int, Rate]
    quantize: Rate
    device_rank: Rate
    host_rank: Rate
    step_s: float
    split_s: float
    drag: dict[str, float] = field(default_factory=dict)
    slowed: dict[str, float] = field(default_factory=dict)
    prefill_drag: dict[str, float] = field(default_factory=dict)
    prefill_slowed: dict[str, float] = field(default_factory=dict)
    disk_range: tuple[float, float] = (1.0, 1.0)
    linear_int8: dict[int, Rate] = field(default_factory=dict)
    host_linear: dict[int, Rate] = field(default_factory=dict)
    host_read: float = 0.0
    sizes: KernelSizes = KernelSizes()
    about: dict[str, Any] = field(default_factory=dict)

    def products(self, weight_bits: int, matmul_bits: int) -> Rate:
        """Returns the rate of a layer's products: rows -> FLOP/s."""
        linear = self.linear[weight_bits]
        return linear if matmul_bits == 16 else self.linear_int8.get(weight_bits, linear)

    def contention(self, link: str, is_prefill: bool) -> tuple[float, float]:
        """Returns a transfer's `drag` and `slowed`, in prefill or while decoding."""
        drag, slowed = self.drag.get(link, 0.0), self.slowed.get(link, 1.0)
        if is_prefill:
            return self.prefill_drag.get(link, drag), self.prefill_slowed.get(link, slowed)
        return drag, slowed

    def with_disk(self, factor: float) -> HardwareProfile:
        """Returns the profile with direct reads at another rate, and with the same range."""
        low, high = self.disk_range
        scaled = self.disk_read.scaled(factor)
        return replace(self, disk_read=scaled, disk_range=(low / factor, high / factor))

    def corrected(self, disk: Sequence[float], products: Sequence[float] = ()) -> HardwareProfile:
        """Returns the profile, updated by measurements of runs.

        disk: rates of direct reads in runs, relative to `disk_read`, the latest last; products: the
        same of runs that were bound by computing, relative to `linear`.
        """
        low, high = self.disk_range
        corrected = replace(self, disk_range=(min(low, *disk, 1.0), max(high, *disk, 1.0)))
        if products:
            speed = median(products[-NUM_DISK_RATES:])
            linear = {bits: rate.scaled(speed) for bits, rate in self.linear.items()}
            corrected = replace(corrected, linear=linear)
        return corrected.with_disk(median([1.0, *disk[-NUM_DISK_RATES:]]))

    def disk_rate_seen(self, reads: Sequence[DiskReads], busy_s: float) -> float:
        """Returns how fast a run's direct reads were, relative to `disk_read`.

        busy_s: seconds with at least one active operation.
        """
        expected = 0.0
        for nbytes, size, is_prefill in reads:
            _, slowed = self.contention("disk_read", is_prefill)
            expected += slowed * self.disk_read.seconds(nbytes, size)
        return expected / busy_s

    @property
    def is_assumed(self) -> bool:
        return self.about.get("source") == ASSUMED

    @property
    def in_words(self) -> str:
        """The profile's origin, in one line."""
        if self.about.get("source") == MEASURED:
            return f"{self.name}, measured at {self.about.get('measured_at')}"
        if not self.is_assumed:
            return f"{self.name} ({self.about.get('source')})"
        rates = ", ".join(f"{name} {self.about[name]}" for name in ("memory", "products", "disk"))
        return f"{self.name} from {rates}; `flexgen-jax profile` measures it"

    def spread(self) -> float:
        """Returns the median of the spreads of all rates; 0 if nothing was measured."""
        ratios: list[float] = []
        for member in fields(self):
            value = getattr(self, member.name)
            for rate in value.values() if isinstance(value, Mapping) else (value,):
                ratios += rate.spread if isinstance(rate, Rate) else ()
        return median(ratios) if ratios else 0.0

    def to_json(self) -> str:
        return json.dumps({"version": PROFILE_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> HardwareProfile:
        """Reads what `to_json` wrote; raises `ProfileError` on anything else."""
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ProfileError(f"not JSON: {error}") from None
        if not isinstance(raw, Mapping):
            raise ProfileError("a hardware profile must be a JSON object")
        if raw.get("version") != PROFILE_VERSION:
            raise ProfileError(
                f"it has version {raw.get('version')!r} instead of {PROFILE_VERSION}; run "
                "`flexgen-jax profile` again"
            )
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in raw]
        unknown = sorted(set(raw) - {*names, "version"})
        if missing or unknown:
            raise ProfileError(f"field {(missing + unknown)[0]!r} is missing or unknown")
        try:
            return cls(
                **{field.name: _parse(str(field.type), raw[field.name]) for field in fields(cls)}
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ProfileError(f"cannot be read: {error}") from None


def _parse(kind: str, value: Any) -> Any:
    """Returns a field's value from JSON; kind: the field's annotation, e.g. "Rate"."""
    if kind == "Rate":
        points = tuple((float(size), float(rate)) for size, rate in value["points"])
        return Rate(points, tuple(float(x) for x in value["spread"]))
    if kind == "KernelSizes":
        defaults = asdict(KernelSizes())
        return KernelSizes(**{name: type(defaults[name])(size) for name, size in value.items()})
    if kind == "dict[int, Rate]":
        return {int(bits): _parse("Rate", rate) for bits, rate in value.items()}
    if kind == "tuple[float, float]":
        low, high = map(float, value)
        return low, high
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](value)
    return value
