"""How much work kernels take at once, as plans count it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.policy.hardware import DiskReads, HardwareProfile, KernelSizes, ProfileError, Rate
from tests.helpers.profiles import machine

SIZES = KernelSizes(prefill_rows=1000, packed_prefill_rows=2000, score_bytes=1 << 20)


@given(heads=st.integers(1, 10_000), tokens=st.integers(1, 4096))
def test_prefill_forms_as_many_scores_together_as_fit(heads: int, tokens: int) -> None:
    found, one = SIZES.scored_heads(heads, tokens), 4 * tokens**2
    assert 1 <= found <= heads
    assert found * one <= SIZES.score_bytes or found == 1
    assert found == heads or (found + 1) * one > SIZES.score_bytes


@given(batch=st.integers(1, 1000), tokens=st.integers(1, 4096), bits=st.sampled_from([16, 8, 4]))
def test_prefill_takes_as_many_sequences_together_as_fit(
    batch: int, tokens: int, bits: int
) -> None:
    found = SIZES.prefill_sequences(batch, tokens, bits)
    most = 1000 if bits == 16 else 2000
    assert 1 <= found <= batch
    assert found * tokens <= most or found == 1
    assert found == batch or (found + 1) * tokens > most


@pytest.mark.parametrize(("rows", "out", "nbytes"), [(1, 64, 4096), (64, 64, 4 * 64 * 64)])
def test_a_part_is_no_smaller_than_its_product(rows: int, out: int, nbytes: int) -> None:
    assert KernelSizes(part_bytes=4096).unpacked_bytes(rows, out) == nbytes


def test_sizes_are_part_of_a_profile() -> None:
    profile = machine(sizes=SIZES)
    assert HardwareProfile.from_json(profile.to_json()) == profile
    with pytest.raises(ProfileError, match="cannot be read"):
        HardwareProfile.from_json(profile.to_json().replace('"score_bytes"', '"score_pages"'))


def test_contention_of_prefill_is_that_of_decoding_unless_it_was_measured() -> None:
    hw = machine(drag={"disk_read": 0.2}, slowed={"disk_read": 2.0})
    assert [hw.contention("disk_read", phase) for phase in (True, False)] == [(0.2, 2.0)] * 2
    both = replace(hw, prefill_drag={"disk_read": 0.5}, prefill_slowed={"disk_read": 1.5})
    assert both.contention("disk_read", True) == (0.5, 1.5)
    assert both.contention("disk_read", False) == (0.2, 2.0)
    assert both.contention("page_cache", True) == (0.0, 1.0)


def test_runs_correct_the_disk() -> None:
    """Their median counts, with the profile's own rate; all of them are within the range."""
    hw = replace(machine(disk_read=Rate.constant(1e9)), disk_range=(0.9, 1.2))
    assert hw.corrected([]) == hw
    found = hw.corrected([0.1, 0.5, 0.6, 0.5, 0.6])
    assert found.disk_read.at(1e6) == pytest.approx(0.6e9)  # of the last four, and 1
    assert found.disk_range == pytest.approx((0.1 / 0.6, 1.2 / 0.6))


def test_what_a_run_sees_of_the_disk_is_relative_to_what_was_expected() -> None:
    """1 s for 1 GB in prefill and, slowed down, 3 s for 1.5 GB of decoding, took 8."""
    hw = machine(disk_read=Rate(((1e6, 1e9), (1e7, 2e9))), slowed={"disk_read": 4.0})
    hw = replace(hw, prefill_slowed={"disk_read": 1.0})
    reads = [DiskReads(1e9, 1e6, True), DiskReads(1.5e9, 1e7, False)]
    assert hw.disk_rate_seen(reads, 8.0) == pytest.approx((1.0 + 4 * 0.75) / 8)
