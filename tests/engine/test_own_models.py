"""Models that a program has in memory, and families of other packages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from flexgen_jax import LLM, Model, Policy, SamplingParams, UserError, register_family
from flexgen_jax.evaluation.contract import check_model
from flexgen_jax.models.families import FAMILIES
from tests.helpers.models import byte_tokenizer
from tests.helpers.numpy_llama import LLAMA, MIXTRAL, write

PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
IDS = [[5, 6, 7, 8], [9, 10]]


class Rows:
    """Rows that are read when they are asked for, as from a file; notes which."""

    def __init__(self, array: np.ndarray, reads: list[Any]) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._array, self._reads = array, reads

    def __getitem__(self, index: Any) -> np.ndarray:
        self._reads.append(index)
        return self._array[index]


@pytest.mark.parametrize("config", [LLAMA, pytest.param(MIXTRAL, marks=pytest.mark.slow)])
def test_a_model_of_arrays_is_that_of_its_files(config: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "files", config)
    (tmp_path / "files" / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    arrays, reads = load_file(tmp_path / "files" / "model.safetensors"), list[Any]()
    on_disk = {"policy": Policy.from_percent(0, 0, 100, 0, 100, 0, batch_size=2)}
    with LLM(tmp_path / "files", dtype="float32") as llm:
        wanted = llm.generate(prompt_token_ids=IDS, sampling_params=PARAMS)
    given = {
        "arrays of JAX": {name: jnp.asarray(array) for name, array in arrays.items()},
        "rows": {name: Rows(array, reads) for name, array in arrays.items()},
    }
    for name, tensors in given.items():
        model = Model.from_arrays(config, tensors, name=name)
        with LLM(model, dtype="float32", offload_dir=tmp_path / "off", **on_disk) as llm:
            assert llm.name == name
            made = llm.generate(prompt_token_ids=IDS, sampling_params=PARAMS)
        assert [x.token_ids for x in made] == [x.token_ids for x in wanted]
    assert reads
    texts = Model.from_arrays(config, arrays, tokenizer=tmp_path / "files")
    with LLM(texts, dtype="float32") as llm:
        assert llm.generate(["ab"], PARAMS)[0].text


def test_weights_that_changed_are_not_taken_from_disk(tmp_path: Path) -> None:
    """Of two versions of a model, one number of which differs."""
    write(tmp_path / "files", LLAMA)
    arrays = load_file(tmp_path / "files" / "model.safetensors")
    policy = Policy.from_percent(0, 0, 100, 0, 100, 0, batch_size=2)
    scores = []
    for change in (0.0, 3.0, 0.0):
        changed = {**arrays, "model.norm.weight": arrays["model.norm.weight"].copy()}
        changed["model.norm.weight"][3] += change
        model = Model.from_arrays(LLAMA, changed)
        with LLM(model, dtype="float32", policy=policy, offload_dir=tmp_path / "off") as llm:
            scores.append(llm.score(prompt_token_ids=[IDS[0]])[0].logprobs)
    assert scores[0] == scores[2] != scores[1]


def test_what_is_wrong_with_arrays_is_named(tmp_path: Path) -> None:
    write(tmp_path / "files", LLAMA)
    arrays = load_file(tmp_path / "files" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for tensors, said in (
        ({k: v for k, v in arrays.items() if k != name}, "mine: tensor '.*up_proj.* is missing"),
        ({**arrays, name: arrays[name][1:]}, "up_proj.weight' has shape"),
        ({**arrays, name: "x"}, "up_proj.weight' is str"),
        ({**arrays, "more": arrays[name]}, "'more' is not part of the model"),
    ):
        with pytest.raises(UserError, match=said):
            Model.from_arrays(LLAMA, tensors, name="mine")
    with pytest.raises(UserError, match="mine: model_type 'lama' is not supported"):
        Model.from_arrays(LLAMA | {"model_type": "lama"}, arrays, name="mine")
    with pytest.raises(UserError, match="stages need a model in a folder"):
        LLM(Model.from_arrays(LLAMA, arrays), stages=2)


def test_a_family_of_another_package_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_jax.models.families.FAMILIES", dict(FAMILIES))
    own = replace(FAMILIES["llama"], model_type="my_llama")
    register_family(own)
    register_family(own)
    with pytest.raises(UserError, match="already has a family"):
        register_family(replace(FAMILIES["mistral"], model_type="my_llama"))
    folder = tmp_path / "model"
    model = write(folder, LLAMA)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "my_llama"}))
    check_model(folder, lambda ids: model.logits(ids))
    with pytest.raises(AssertionError, match="tokens"):
        check_model(folder, lambda ids: -model.logits(ids))
    with pytest.raises(AssertionError, match="log-probabilities of"):
        check_model(folder, lambda ids: 1.01 * model.logits(ids))


def test_families_are_found_by_entry_points(tmp_path: Path) -> None:
    """Of an installed distribution, without a call."""
    site, found = tmp_path / "site", tmp_path / "site" / "mine-1.0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (found / "entry_points.txt").write_text("[flexgen_jax.families]\nmine = mine:FAMILY\n")
    (site / "mine.py").write_text(
        "from dataclasses import replace\n"
        "from flexgen_jax.models.families import FAMILIES\n"
        "FAMILY = replace(FAMILIES['llama'], model_type='mine')\n"
    )
    code = f"""
import sys; sys.path.insert(0, {str(site)!r})
from flexgen_jax.models.families import family_of, read_config
config = read_config({LLAMA | {"model_type": "mine"}!r})
print(family_of(config).model_type)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "mine", ran.stderr
