"""A model that attends and one with experts, against NumPy, wherever their data lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.contract import ALL_AXES, Case, Contract, cases_with
from tests.helpers.models import write_checkpoint
from tests.helpers.numpy_llama import MIXTRAL, write
from tests.helpers.numpy_opt import reference


@pytest.fixture(scope="session")
def contracts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Contract]:
    @cache
    def get(model: str) -> Contract:
        folder = tmp_path_factory.mktemp(model)
        if model == "opt":
            return Contract(reference(write_checkpoint(folder)))
        return Contract(write(folder, MIXTRAL | {"num_local_experts": 8}))

    return get


@pytest.mark.parametrize(
    ("model", "case"),
    [case for seed in range(3) for case in cases_with("model", ["opt", "mixtral"], ALL_AXES, seed)],
)
def test_tokens_are_those_of_a_resident_run(
    contracts: Callable[[str], Contract],
    model: str,
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contracts(model).check(case, tmp_path, monkeypatch)
