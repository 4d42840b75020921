"""Compares predictions on `t4-16gb` with the paper's measurements: tables 15, 16 and 21.

python scripts/benchmarks/compare_paper.py            prints the tables of docs/policy.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.stats import spearmanr

from flexgen_jax.models.shapes import known_shape
from flexgen_jax.policy.machines import known_machine
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.fit import Budgets
from flexgen_jax.search.problem import Choices, Problem
from flexgen_jax.search.search import evaluate, search

GEN = 32


@dataclass(frozen=True)
class Row:
    """One measured policy of the paper; percent is as printed there."""

    table: int
    model: str
    prompt: int
    batch: int
    batches: int
    percent: tuple[int, ...]
    measured: float
    bits: tuple[int, int] = (16, 16)

    @property
    def policy(self) -> Policy:
        """The policy as the original implementation ran it: its CPU attends to the cache unless
        that is compressed."""
        attention = "host" if self.bits == (16, 16) else "device"
        return Policy.from_percent(
            *carried_out(self.percent),
            batch_size=self.batch,
            num_batches=self.batches,
            weight_bits=self.bits[0],
            cache_bits=self.bits[1],
            weight_format="paper",
            attention=attention,
        )

    @property
    def is_host_only(self) -> bool:
        """Whether the row puts nothing on disk."""
        pairs = zip(self.percent[::2], self.percent[1::2], strict=True)
        return all(device + host == 100 for device, host in pairs)

    @property
    def problem(self) -> Problem:
        asked = problem(self.model, self.prompt, self.batch * self.batches)
        if self.table != 21:
            return asked
        # The paper switched the page cache off; without a limit, no RAM counts as left over for it.
        return replace(asked, budgets=replace(asked.budgets, host=None))

    @property
    def predicted(self) -> float:
        return evaluate(self.problem, self.policy).throughput

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def carried_out(percent: tuple[int, ...]) -> tuple[float, ...]:
    """Returns the percentages that the original implementation really used, for those asked for.

    It assigns whole tensors of each layer by their midpoints: of "20 80" a twelfth of the weights
    is on the GPU (one of the four attention weights), of "4 96" nothing.
    """
    share = {20: 100 / 12, 4: 0.0}.get(percent[0], float(percent[0]))
    return (share, 100 - share if share != percent[0] else percent[1], *percent[2:])


def problem(model: str, prompt: int, sequences: int, bits: Sequence[int] = (16,)) -> Problem:
    hw = known_machine("t4-16gb")
    return Problem(
        setting=Setting(known_shape(f"facebook/opt-{model}"), "float16", False, hw.sizes),
        hw=hw,
        budgets=Budgets(hw.device_memory, hw.host_memory, hw.disk_space),
        workload=Workload(prompt, GEN, sequences),
        choices=Choices(tuple(bits), tuple(bits)),
    )


DEVICE = (100, 0, 100, 0, 100, 0)
HOST = (0, 100, 0, 100, 0, 100)
HALF = (0, 50, 0, 0, 0, 100)
FOUR = (4, 4)
CACHE = (16, 4)
"""Bits of weights and cache of OPT-30B's compressed rows, which compress the cache only, by the
authors' published commands."""

ROWS = (
    Row(15, "6.7b", 512, 2, 1, DEVICE, 25.26),
    Row(15, "30b", 512, 48, 3, (20, 80, 0, 100, 0, 100), 7.32),
    Row(15, "175b", 512, 32, 8, HALF, 0.69),
    Row(15, "6.7b", 512, 72, 1, DEVICE, 29.12, FOUR),
    Row(15, "30b", 512, 16, 20, (20, 80, 0, 100, 100, 0), 8.70, CACHE),
    Row(15, "175b", 512, 48, 3, HOST, 1.12, FOUR),
    Row(16, "6.7b", 1024, 1, 1, DEVICE, 13.72),
    Row(16, "30b", 1024, 20, 4, (4, 96, 0, 100, 0, 100), 3.50),
    Row(16, "175b", 1024, 12, 12, HALF, 0.35),
    Row(16, "6.7b", 1024, 28, 1, DEVICE, 13.18, FOUR),
    Row(16, "30b", 1024, 20, 12, HOST, 3.98, CACHE),
    Row(16, "175b", 1024, 12, 4, HOST, 0.42, FOUR),
    Row(21, "30b", 512, 48, 3, (20, 80, 0, 100, 0, 100), 7.32),
    Row(21, "30b", 512, 48, 3, HOST, 7.26),
    Row(21, "30b", 512, 48, 1, (20, 80, 0, 100, 0, 100), 5.40),
    Row(21, "30b", 512, 32, 8, HALF, 1.66),
    Row(21, "30b", 512, 32, 8, (0, 0, 0, 0, 0, 100), 1.55),
    Row(21, "30b", 512, 32, 1, HALF, 0.88),
    Row(21, "30b", 512, 1, 1, (20, 80, 100, 0, 100, 0), 0.20),
    Row(21, "30b", 512, 1, 1, (0, 50, 100, 0, 100, 0), 0.04),
    Row(21, "30b", 512, 8, 1, (0, 100, 100, 0, 100, 0), 1.57),
    Row(21, "30b", 512, 2, 1, (0, 0, 100, 0, 100, 0), 0.05),
    Row(21, "175b", 512, 32, 8, HALF, 0.49),
    Row(21, "175b", 512, 32, 8, (0, 0, 0, 0, 0, 100), 0.44),
    Row(21, "175b", 512, 32, 1, HALF, 0.23),
    Row(21, "175b", 512, 1, 1, (0, 50, 100, 0, 100, 0), 0.01),
    Row(21, "175b", 512, 2, 1, (0, 0, 100, 0, 100, 0), 0.01),
)


def rank_correlation(model: str) -> float:
    """Returns Spearman's rank correlation of the measured and predicted throughput in table 21."""
    rows = [row for row in ROWS if row.table == 21 and row.model == model]
    return float(spearmanr([r.measured for r in rows], [r.predicted for r in rows]).statistic)


def main() -> None:
    print("| table | model | prompt | batches | percent | bits | paper | predicted | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        percent = " ".join(str(x) for x in row.percent)
        bits = f"{row.bits[0]}/{row.bits[1]}"
        print(
            f"| {row.table} | {row.model} | {row.prompt} | {row.batch} x {row.batches} | {percent} "
            f"| {bits} | {row.measured:g} | {row.predicted:.3g} | {100 * row.error:+.0f} % |"
        )
    for model in ("30b", "175b"):
        print(f"table 21, {model}: Spearman {rank_correlation(model):.3f}")
    for model in ("6.7b", "30b", "175b"):
        for bits in ((16,), (16, 4)):
            best = search(problem(model, 512, 0, bits))[0]
            theirs = [
                r.predicted
                for r in ROWS
                if r.model == model and r.prompt == 512 and set(r.bits) <= set(bits)
            ]
            print(f"{model}, bits {bits}: chosen {best.throughput:.3g}, theirs {max(theirs):.3g}")


if __name__ == "__main__":
    main()
