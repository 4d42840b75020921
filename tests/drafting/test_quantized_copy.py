"""Checkpoints in own formats: what `convert --weight-bits` writes is what a run would make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.drafting.input_sizes import input_sizes, windows_of_text
from flexgen_jax.drafting.quantized_copy import QuantizedCopy, quantize_folder
from flexgen_jax.errors import UserError
from flexgen_jax.models.checkpoint import Checkpoint
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.progress import Progress
from tests.helpers.families import NEW_TOKENS, Reference
from tests.helpers.models import prompts

torch = pytest.importorskip("torch")
QUIET = Progress(False)


def tokens_of(folder: Path, work: Path, bits: int = 16) -> list[list[int]]:
    policy = Policy(batch_size=4, weight_bits=bits)
    with LLM(folder, dtype="float32", policy=policy, offload_dir=work) as llm:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        found = llm.generate(prompt_token_ids=prompts(), sampling_params=params)
    return [list(each.token_ids) for each in found]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "bits"), [("llama", 4), ("phi3", 8), ("gpt_neox", 4), ("qwen2_moe", 4)]
)
def test_a_copy_is_what_a_run_makes(tmp_path: Path, family: str, bits: int) -> None:
    """Queries, keys and values may be stored in one matrix, by parts or woven."""
    source = Reference(tmp_path / "source", family, 0).folder
    each = quantize_folder(source, tmp_path / "copy", bits=bits, text=None, progress=QUIET)
    assert bits < each < 33
    with LLM(tmp_path / "copy", dtype="float32", policy=Policy(batch_size=1)) as llm:
        assert llm.config.published is not None
    made = tokens_of(tmp_path / "copy", tmp_path / "work")
    assert made == tokens_of(source, tmp_path / "work", bits)


def test_sizes_of_inputs_are_those_that_transformers_sees(tmp_path: Path) -> None:
    reference = Reference(tmp_path / "source", "llama", 1)
    ids = np.random.default_rng(0).integers(3, 96, (2, 12)).astype(np.int32)
    seen: dict[str, np.ndarray] = {}

    def keep(name: str):  # type: ignore[no-untyped-def]
        def hook(_module, given, _result) -> None:  # type: ignore[no-untyped-def]
            seen[name] = given[0].double().square().mean((0, 1)).numpy()

        return hook

    layers = reference.model.model.layers
    theirs = {
        "attention.q": "self_attn.q_proj",
        "attention.out": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.down": "mlp.down_proj",
    }
    for number, layer in enumerate(layers):
        for ours, name in theirs.items():
            key = f"decoder.{number}.{ours}.kernel"
            layer.get_submodule(name).register_forward_hook(keep(key))
    with torch.inference_mode():
        reference.model(torch.tensor(ids))
    sizes = input_sizes(Checkpoint(reference.folder), ids)
    assert seen
    for key, expected in seen.items():
        np.testing.assert_allclose(sizes[key], expected, rtol=1e-4)


def test_calibrating_makes_the_weighted_error_smaller(tmp_path: Path) -> None:
    """By the formula: the squares of errors times the root mean squares of the inputs."""
    source = Checkpoint(Reference(tmp_path / "source", "llama", 0).folder)
    rng, sizes = np.random.default_rng(0), {}
    for key in ("decoder.0.mlp.gate.kernel", "decoder.2.attention.q.kernel"):
        sizes[key] = rng.lognormal(sigma=2, size=32).astype(np.float32)
    QuantizedCopy(source, 4).write(tmp_path / "plain")
    QuantizedCopy(source, 4, sizes).write(tmp_path / "calibrated")
    from flexgen_jax.models.spec_of_config import model_spec

    tensors = model_spec(source.config).tensors
    for key, each in sizes.items():
        whole = source.read(tensors[key], 0, tensors[key].shape[0], "float32")
        errors = []
        for name in ("plain", "calibrated"):
            copy = Checkpoint(tmp_path / name)
            tensor = model_spec(copy.config).tensors[key]
            away = copy.read(tensor, 0, tensor.shape[0], "float32") - whole
            errors.append(float((away.astype(np.float64) ** 2 * np.sqrt(each)).sum()))
        assert errors[1] < 0.95 * errors[0]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    source = Reference(tmp_path / "source", "llama", 0).folder
    quantize_folder(source, tmp_path / "copy", bits=4, text=None, progress=QUIET)
    with pytest.raises(CheckpointError, match="already"):
        quantize_folder(tmp_path / "copy", tmp_path / "again", bits=4, text=None, progress=QUIET)
    with pytest.raises(CheckpointError, match="a folder other than"):
        quantize_folder(source, source, bits=4, text=None, progress=QUIET)
    with pytest.raises(UserError, match="too few tokens"):
        quantize_folder(source, tmp_path / "x", bits=4, text="a", progress=QUIET)
    experts = Reference(tmp_path / "experts", "qwen2_moe", 0).folder
    with pytest.raises(UserError, match="mixtures of experts"):
        quantize_folder(experts, tmp_path / "x", bits=4, text="a b c d" * 9, progress=QUIET)


def test_buffers_of_other_dtypes_are_copied(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = Reference(tmp_path / "source", "llama", 0).folder
    file = source / "model.safetensors"
    buffers = {
        "model.layers.0.self_attn.masked_bias": np.array(True),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float64),
        "model.position_ids": np.arange(4, dtype=np.int32)[None],
    }
    save_file(load_file(file) | buffers, file)
    quantize_folder(source, tmp_path / "copy", bits=8, text=None, progress=QUIET)
    copied = load_file(tmp_path / "copy" / "model.safetensors")
    for name, buffer in buffers.items():
        np.testing.assert_array_equal(copied[name], buffer)
        assert copied[name].dtype == buffer.dtype


def test_windows_of_a_text() -> None:
    assert windows_of_text(list(range(1300)), 4096).shape == (2, 512)
    assert windows_of_text(list(range(100)), 32).shape == (3, 32)


def test_broken_copies_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = Reference(tmp_path / "source", "llama", 0).folder
    quantize_folder(source, tmp_path / "copy", bits=4, text=None, progress=QUIET)
    file = tmp_path / "copy" / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"
    whole = load_file(file)
    for end in ("scale", "minimum_of", "shape"):
        save_file({k: v for k, v in whole.items() if k != f"{name}.{end}"}, file)
        with pytest.raises(CheckpointError, match="is missing"):
            Checkpoint(tmp_path / "copy")
    cut = whole[f"{name}.packed"][:-1]
    save_file(whole | {f"{name}.packed": cut}, file)
    with pytest.raises(CheckpointError, match="shape"):
        Checkpoint(tmp_path / "copy")
