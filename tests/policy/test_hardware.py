"""How much work kernels take at once, as plans count it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.policy.hardware import HardwareProfile, KernelSizes, ProfileError
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
