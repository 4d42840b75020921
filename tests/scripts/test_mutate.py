"""What the mutation script changes, and what it leaves alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = b'''"""1 + 1"""
from typing import Literal

FORMAT_VERSION = 3
Bits = Literal[16, 8]

@dataclass(frozen=True)
class Some:
    size: tuple[3, 4] = (5,)  # 6 + 6

    def of(self, x: "1 < 2" = None, y=True) -> Literal[7]:
        """2 * 2"""
        if not x and (y) >= -8.5 or x is not None:
            return max(x, y,
                       0x10)
        return f"\xc3\xa9 {x + 1}" if x == "\xc3\xa9" != y else 3 // x
'''


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "scripts" / "checks"))


@pytest.mark.usefixtures("scripts")
def test_one_operator_or_constant_is_changed_at_a_time() -> None:
    from mutate import mutants_of

    found = list(mutants_of("a.py", SOURCE))
    assert sorted((m.line, m.old, m.new) for m in found) == sorted(
        [
            (9, "5", "6"),
            (11, "True", "False"),
            (13, "not ", ""),
            (13, "and", "or"),
            (13, ">=", ">"),
            (13, "8.5", "17.0"),
            (13, "or", "and"),
            (13, "is not", "is"),
            (14, "max", "min"),
            (15, "0x10", "17"),
            (16, "==", "!="),
            (16, "!=", "=="),
            (16, "//", "%"),
            (16, "3", "4"),
        ]
    )
    original = ast.dump(ast.parse(SOURCE))
    for mutant in found:
        changed = mutant.applied(SOURCE)
        assert ast.dump(ast.parse(changed)) != original
        assert changed.count(b"\n") == SOURCE.count(b"\n")


@pytest.mark.usefixtures("scripts")
def test_every_room_has_its_share_of_the_mutants() -> None:
    from mutate import draw, mutants_of

    all_ = list(mutants_of("a.py", SOURCE))
    places = {"large": all_[:12], "small": all_[12:13], "middle": all_[:6]}
    drawn = draw(places, 10, seed=0)
    assert {room: len(mutants) for room, mutants in drawn.items()} == {
        "large": 6,
        "small": 1,
        "middle": 3,
    }
    assert drawn == draw(places, 10, seed=0) != draw(places, 10, seed=1)
    assert all(set(mutants) <= set(places[room]) for room, mutants in drawn.items())
