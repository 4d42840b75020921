"""The suites of `benchmark.py`, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Ours:
    """One way to run `flexgen-jax bench`.

    policy: changes to the policy that the case's first run chose, so that a single technique is
    removed; None if the flags say everything.
    """

    name: str
    flags: tuple[str, ...] = ()
    policy: dict[str, object] | None = None


@dataclass(frozen=True)
class Case:
    """One shape of model and workload under one memory limit, for this project and the reference.

    limit: bytes of the memory cgroup, page cache included, or with `on_gpu` of the GPU; offloads:
    the reference's ways (see torch_reference.py), each at its best batch, found by doubling from
    `batch`, or at exactly that batch if `is_batch_fixed`.
    """

    name: str
    model: str
    prompt_len: int
    gen_len: int
    limit: int
    ours: tuple[Ours, ...]
    offloads: tuple[str, ...] = ("disk", "auto")
    batch: int = 16
    is_batch_fixed: bool = False
    on_gpu: bool = False
    timeout: float = 1200


FOUR = ("--weight-bits", "4", "--cache-bits", "4")
BOTH = (Ours("16 bits"), Ours("4 bits", FOUR))
INTEGERS = Ours("8-bit products", (*FOUR, "--weight-format", "paper", "--matmul-bits", "8"))
MINUTES = ("--num-sequences", "64")
"""Flags for a number of sequences that takes minutes on a CPU, where a free choice takes much
longer."""

BRIEF = tuple(Ours(ours.name, (*ours.flags, *MINUTES)) for ours in BOTH)
SMALL = "facebook/opt-1.3b"


def in_memory(batch: int) -> Case:
    flags = ("--percent", "100", "0", "100", "0", "100", "0", "--warm-up")  # as the reference runs
    flags += ("--batch-size", str(batch), "--num-batches", "1")
    ours = (Ours(f"batch {batch}", flags),)
    name = f"in memory, batch {batch}"
    return Case(name, SMALL, 128, 32, 16 * 10**9, ours, ("none",), batch, is_batch_fixed=True)


def cpu_quick() -> list[Case]:
    """Returns cases that take about ten minutes."""
    case = Case("OPT-1.3B, 2.5 GB", SMALL, 128, 8, 25 * 10**8, BOTH, ("disk",), 32)
    return [case, in_memory(4)]


def cpu_full() -> list[Case]:
    ours = (*BOTH, INTEGERS)
    return [
        Case("OPT-1.3B, 1.5 GB", SMALL, 128, 32, 15 * 10**8, ours),
        *(in_memory(batch) for batch in (1, 4, 32)),
        Case(
            "OPT-6.7B, 4 GB", "facebook/opt-6.7b", 256, 16, 4 * 10**9, ours, batch=8, timeout=5400
        ),
    ]


def gpu_16gb(has_gpu: bool) -> list[Case]:
    """Returns the cases of the paper's table 2; without a GPU, a tenth of the models' size and
    memory."""
    models = ("facebook/opt-6.7b", "facebook/opt-30b", "facebook/opt-175b")
    offloads, limit, prompts = ("none", "cpu", "auto", "zero"), 16 * 10**9, (512, 1024)
    ours = BOTH
    if not has_gpu:
        ours = BRIEF
        models = ("facebook/opt-125m", "facebook/opt-1.3b", "facebook/opt-2.7b")
        offloads, limit, prompts = ("none", "disk", "auto"), 16 * 10**8, (51, 102)
    return [
        Case(
            f"{model.split('/')[1]}, prompt {prompt}",
            model,
            prompt,
            32,
            limit,
            # OPT-175B in 16 bits needs more disk and memory than the test machine has.
            ours[1:] if "175b" in model else ours,
            offloads,
            4,
            on_gpu=has_gpu,
        )
        for model in models
        for prompt in prompts
    ]


def ablation() -> list[Case]:
    """Returns the cases of tables 4 and 23: one technique less at a time."""
    plain = (*MINUTES, "--percent", "0", "0", "0", "100", "100", "0")
    plain += ("--batch-size", "16", "--num-batches", "1")
    row = {"schedule": "row", "batch_size": 4, "num_batches": 1}  # its cache fits beside weights
    row |= {"cache": {"device": 1.0, "host": 0.0}, "activations": {"device": 1.0, "host": 0.0}}
    ours = (
        Ours("all techniques", MINUTES),
        Ours("no policy search", plain),
        Ours("no overlap", MINUTES, policy={"overlap": False}),
        Ours("no attention on the host", MINUTES, policy={"attention": "device"}),
        Ours("row by row, cache on the device", MINUTES, policy=row),
    )
    return [Case("OPT-1.3B, 2.5 GB", SMALL, 128, 32, 25 * 10**8, ours, ())]


def latency() -> list[Case]:
    """Returns the cases of figure 1: throughput over the latency of a block, by its size."""
    sizes = (1, 4, 16, 64, 128)
    ours = tuple(Ours(f"{n} sequences", ("--num-sequences", str(n))) for n in sizes)
    case = Case("OPT-1.3B, 2.5 GB", SMALL, 128, 32, 25 * 10**8, ours, ("disk",), 1)
    return [case]


def lengths() -> list[Case]:
    return [
        Case(f"{prompt} + {new}", SMALL, prompt, new, 25 * 10**8, BRIEF, ("disk",), 16)
        for prompt, new in ((128, 128), (512, 8), (256, 32))
    ]


def suites(has_gpu: bool) -> dict[str, Callable[[], list[Case]]]:
    return {
        "cpu-quick": cpu_quick,
        "cpu-full": cpu_full,
        "gpu-16gb": lambda: gpu_16gb(has_gpu),
        "ablation": ablation,
        "latency": latency,
        "lengths": lengths,
    }


def narrowed(cases: list[Case], only: str, ours: str) -> list[Case]:
    """Returns the cases whose name contains `only`, each with those of our ways whose name contains
    `ours`.

    Raises `ValueError` if nothing is left to run.
    """
    named = [case for case in cases if only in case.name]
    if not named:
        there = ", ".join(repr(case.name) for case in cases)
        raise ValueError(f"--only {only!r} is in no case's name; there are {there}")
    left = (replace(case, ours=tuple(w for w in case.ours if ours in w.name)) for case in named)
    found = [case for case in left if case.ours]
    if not found:
        there = ", ".join(dict.fromkeys(repr(way.name) for case in named for way in case.ours))
        raise ValueError(f"--ours {ours!r} is in no name of our ways; there are {there}")
    return found
