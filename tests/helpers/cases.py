"""Which of many combinations every run tries; the others are for `-m slow`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Sequence[Any], together: int = 2) -> list[Any]:
    """All combinations, for `parametrize`: some few that have every pair of choices among them (or
    every `together` of them), and the others marked as slow."""
    fast = chosen_few([len(axis) for axis in axes], together)
    found = []
    for chosen in product(*(range(len(axis)) for axis in axes)):
        values = [axis[index] for axis, index in zip(axes, chosen, strict=True)]
        marks = () if chosen in fast else pytest.mark.slow
        name = "-".join(str(value).replace(" ", "") for value in values)
        found.append(pytest.param(*values, marks=marks, id=name))
    return found


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Some few combinations that have every pair of choices among them; but for fewer that have
    every choice, they are marked as slow."""
    sizes = [len(axis) for axis in axes]
    fast = chosen_few(sizes, 1)
    found = []
    for chosen in dict.fromkeys([*fast, *chosen_few(sizes, 2)]):
        values = [axis[index] for axis, index in zip(axes, chosen, strict=True)]
        found.append(pytest.param(*values, marks=() if chosen in fast else pytest.mark.slow))
    return found


def chosen_few(sizes: Sequence[int], together: int) -> list[tuple[int, ...]]:
    """Few combinations of indices in which any `together` of them occur, found greedily."""

    def parts(chosen: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(chosen), together))

    def worth(chosen: tuple[int, ...]) -> tuple[int, int]:
        return len(parts(chosen) & left), -sum(used[choice] for choice in enumerate(chosen))

    everything = list(product(*map(range, sizes)))
    left = set().union(*map(parts, everything))
    used: Counter[tuple[int, int]] = Counter()  # so that each choice has its share
    found = []
    while left:
        found.append(max(everything, key=worth))
        left -= parts(found[-1])
        used.update(enumerate(found[-1]))
    return found
