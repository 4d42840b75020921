"""Which of many combinations every run tries; the others are for `-m slow`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings


def examples(count: int) -> settings:
    """Hypothesis draws `count` examples for a test in a quick run, ten times as many in a slow
    one."""
    is_quick = settings.get_current_profile_name() == "quick"
    return settings(max_examples=count if is_quick else 10 * count)


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


def covering_rows(
    axes: Mapping[str, Sequence[Any]],
    is_allowed: Callable[[Mapping[str, Any]], bool],
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Few rows, each with one choice on every axis, that contain every allowed pair of choices.

    is_allowed: also asked of rows that lack some axes. Rows are built greedily around a missing
    pair (Cohen et al. 1997, "The AETG System", section 4).
    """
    rng = random.Random(seed)
    choices = {name: range(len(axis)) for name, axis in axes.items()}

    def is_possible(row: Mapping[str, int]) -> bool:
        return is_allowed({name: axes[name][index] for name, index in row.items()})

    pairs = (
        ((one, i), (other, j))
        for one, other in combinations(axes, 2)
        for i, j in product(choices[one], choices[other])
    )
    missing = dict.fromkeys(pair for pair in pairs if is_possible(dict(pair)))

    def new_pairs(row: Mapping[str, int]) -> list[Any]:
        chosen = [(name, row[name]) for name in axes if name in row]
        return [pair for pair in combinations(chosen, 2) if pair in missing]

    def candidate() -> dict[str, int]:
        row = dict(next(iter(missing)))
        for name in rng.sample([*axes], len(axes)):
            options = [{**row, name: index} for index in choices[name] if name not in row]
            options = [option for option in options if is_possible(option)]
            row = max(options, key=lambda x: (len(new_pairs(x)), rng.random()), default=row)
        return row

    rows = []
    while missing:
        row = max((candidate() for _ in range(8)), key=lambda x: len(new_pairs(x)))
        for pair in new_pairs(row):
            del missing[pair]
        rows.append({name: axes[name][row[name]] for name in axes})
    return rows
