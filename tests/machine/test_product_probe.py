"""The table of products that `flexgen-jax profile` prints."""

from __future__ import annotations

import pytest

from flexgen_jax.cli.profile import products_text
from flexgen_jax.cpu import features
from flexgen_jax.machine import product_probe
from flexgen_jax.machine.product_probe import Product, time_products


@pytest.mark.slow
def test_products_are_timed_by_the_code_that_runs_take(
    monkeypatch: pytest.MonkeyPatch, always: None
) -> None:
    monkeypatch.setattr(product_probe, "COLUMNS", 128)
    monkeypatch.setattr(product_probe, "DEPTH", 64)
    found = list(time_products((1, 96), turns=1))
    assert [(each.rows, each.bits) for each in found] == [(1, 16), (1, 4), (96, 16), (96, 4)]
    assert [each.nbytes for each in found[:2]] == [128 * 64 * 2, 128 * 64 // 2 + 128 * 8]
    for each in found:
        assert each.xla_s > 0
        assert (each.own_s is not None) == bool(features().bf16)


def test_small_products_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_probe, "COLUMNS", 128)
    monkeypatch.setattr(product_probe, "DEPTH", 64)
    assert all(each.own_s is None for each in time_products((1,), turns=1))


def test_the_faster_code_has_a_star() -> None:
    found = [Product(1, 16, 10, 0.001, 0.002), Product(4, 4, 10, 0.003, 0.002)]
    text = products_text([*found, Product(16, 16, 10, None, 0.005)]).splitlines()
    assert text[1].split() == ["1", "row,", "16-bit", "weights", "1.00", "*", "2.00"]
    assert text[2].split() == ["4", "rows,", "4-bit", "weights", "3.00", "2.00", "*"]
    assert text[3].split() == ["16", "rows,", "16-bit", "weights", "-", "5.00", "*"]
