"""Models in the formats in which hubs have them: what transformers computes with the weights that
they stand for, this package computes with the files as they are."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.models.checkpoint import Checkpoint
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.loading import shape_of
from flexgen_jax.models.spec_of_config import model_spec
from tests.helpers.cases import covering
from tests.helpers.models import assert_within_plan, prompts
from tests.helpers.published import FORMATS, mlx, write_gpt_oss, write_published

TIERS = ((100, 0, 100, 0, 100, 0), (30, 40, 20, 50, 0, 100), (0, 0, 0, 0, 0, 0))


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("kind", "family", "percent"),
    covering([*FORMATS], ["llama", "qwen3", "mixtral", "qwen3_5"], TIERS, together=1),
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, kind: str, family: str, percent: tuple[int, ...]
) -> None:
    if kind.startswith("nf4"):
        pytest.importorskip("bitsandbytes")
    reference = write_published(tmp_path / "model", family, kind)
    policy = Policy.from_percent(*percent, batch_size=4, num_batches=2)
    folder = tmp_path / "offload"
    with LLM(reference.folder, dtype="float32", policy=policy, offload_dir=folder) as llm:
        scores = llm.score(prompt_token_ids=prompts())
        report = llm.report()
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=1e-4)
    assert_within_plan(report)


@pytest.mark.parametrize("percent", TIERS)
def test_gpt_oss_is_read_as_it_is_published(tmp_path: Path, percent: tuple[int, ...]) -> None:
    """Experts together in blocks of MXFP4, gates and ups in alternating rows."""
    reference = write_gpt_oss(tmp_path / "model")
    policy = Policy.from_percent(*percent, batch_size=4, num_batches=2)
    folder = tmp_path / "offload"
    with LLM(reference.folder, dtype="float32", policy=policy, offload_dir=folder) as llm:
        scores = llm.score(prompt_token_ids=prompts())
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=1e-4)
    published = shape_of(str(reference.folder)).published
    assert published is not None and published.name == "MXFP4"
    assert len(published.formats) == 9, "gate, up and down of three layers"


def test_the_known_shape_of_gpt_oss_has_its_published_bytes() -> None:
    """The files of the 120B have 65 GB, those of the 20B 13.8."""
    for name, gigabytes in (("gpt-oss-120b", 65.2), ("gpt-oss-20b", 13.8)):
        config = shape_of(name)
        formats = Policy(weight_bits=4).formats("bfloat16")
        size = sum(formats.weight(t).nbytes for t in model_spec(config).tensors.values())
        assert size / 1e9 == pytest.approx(gigabytes, rel=0.01), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8-block", "gptq-zero", "nvfp4"])
def test_stages_read_their_own_part(tmp_path: Path, kind: str) -> None:
    """Two processes, of which each reads its layers of the folder as it is."""
    reference = write_published(tmp_path / "model", "llama", kind)
    options = {"dtype": "float32", "policy": Policy(batch_size=4, num_batches=2)}
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    tokens = []
    for stages in (1, 2):
        with LLM(reference.folder, stages=stages, **options) as llm:
            results = llm.generate(prompt_token_ids=prompts()[:4], sampling_params=params)
        tokens.append([result.token_ids for result in results])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("kind", "bits"), [("fp8-block", 8.03), ("int4", 4.5), ("mxfp4", 4.25), ("awq", 4.5)]
)
def test_bytes_are_those_of_the_format(tmp_path: Path, kind: str, bits: float) -> None:
    """What is planned, and moved, is what the folder has, and no 16 bits."""
    reference = write_published(tmp_path / "model", "llama", kind)
    config = shape_of(str(reference.folder))
    assert config.published is not None
    formats = Policy(weight_bits=config.published.bits).formats("bfloat16")
    kernels = [t for t in model_spec(config).decoders[0].large if t.published is not None]
    assert len(kernels) == 7
    stored = sum(formats.weight(tensor).nbytes for tensor in kernels)
    assert 8 * stored == pytest.approx(bits * sum(t.size for t in kernels), rel=0.02)
    policy = Policy.from_percent(0, 100, 100, 0, 100, 0, batch_size=1)
    with LLM(reference.folder, dtype="bfloat16", policy=policy, unified=False) as llm:
        llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=SamplingParams(max_tokens=1))
        moved = llm.report()["bytes"]["host_to_device"]
    assert moved < 1.1 * sum(
        formats.weight(t).nbytes for layer in model_spec(config).layers for t in layer.large
    )


MUTATIONS: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "no scale": ("fp8-block", lambda t: t.pop(one(t, "weight_scale_inv")), "scale_inv' is missing"),
    "short scale": ("fp8-block", lambda t: shorten(t, "weight_scale_inv"), "has shape"),
    "no zeros": ("gptq", lambda t: t.pop(one(t, "qzeros")), "qzeros' is missing"),
    "short zeros": ("awq", lambda t: shorten(t, "qzeros"), "has shape"),
    "no blocks' scale": ("mxfp4", lambda t: t.pop(one(t, "weight_scale")), "scale' is missing"),
    "short blocks": ("nvfp4", lambda t: shorten(t, "weight_scale"), "has shape"),
    "no minima": ("mlx-4", lambda t: t.pop(one(t, "biases")), "biases' is missing"),
    "short minima": ("mlx-5", lambda t: shorten(t, "biases"), "has shape"),
    "uneven groups": ("gptq-order", lambda t: one_group(t), "elements per group"),
    "short codes": ("int4", lambda t: shorten(t, "weight_packed"), "has shape"),
}


def one(tensors: dict[str, Any], end: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(f".{end}"))


def shorten(tensors: dict[str, Any], end: str) -> None:
    name = one(tensors, end)
    tensors[name] = tensors[name][:-1].clone()


def one_group(tensors: dict[str, Any]) -> None:
    tensors[one(tensors, "g_idx")][:] = 0


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_broken_folders_are_refused_by_name(tmp_path: Path, mutation: str) -> None:
    kind, change, said = MUTATIONS[mutation]
    folder = write_published(tmp_path, "llama", kind).folder
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=said) as error:
        Checkpoint(folder)
    assert "model.safetensors" in str(error.value)


def test_experts_that_mlx_has_stacked(tmp_path: Path) -> None:
    """MLX has one array for all experts of a layer, with names of its own for Mixtral's."""
    reference = write_published(tmp_path, "mixtral", "mlx-4")
    path = tmp_path / "model.safetensors"
    stacked: dict[str, Any] = {}
    experts: dict[str, dict[int, Any]] = defaultdict(dict)
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name, tensor in load_file(path).items():
        match = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.(\w+)", name)
        if match is None:
            stacked[name] = tensor
        else:
            matrix = names.get(match[3], match[3])
            experts[f"{match[1]}.switch_mlp.{matrix}.{match[4]}"][int(match[2])] = tensor
    assert experts
    for name, tensors in experts.items():
        stacked[name] = torch.stack([tensor for _, tensor in sorted(tensors.items())])
    save_file(stacked, path)
    policy = Policy.from_percent(30, 40, 20, 50, 0, 100, batch_size=4)
    with LLM(tmp_path, dtype="float32", policy=policy, offload_dir=tmp_path / "o") as llm:
        scores = llm.score(prompt_token_ids=prompts())
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=1e-4)


def test_mlx_itself_reads_such_bits() -> None:
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(1)
    for bits in (2, 3, 4, 5, 6, 8):
        parts, matrix = mlx(rng, (4, 64), bits)
        arrays = [mx.array(parts[name]) for name in ("weight", "scales", "biases")]
        found = np.array(mx.dequantize(*arrays, group_size=32, bits=bits))
        np.testing.assert_allclose(found, matrix, rtol=1e-5, atol=1e-6)


def test_without_a_config_the_tensors_say_it(tmp_path: Path) -> None:
    """Folders exist whose config does not mention how their weights are stored."""
    folder = write_published(tmp_path, "llama", "int4").folder
    before = Checkpoint(folder).config.published
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    after = Checkpoint(folder).config.published
    assert before is not None and after is not None
    assert after.formats == before.formats


def test_bits_on_top_are_asked_for_twice(tmp_path: Path) -> None:
    reference = write_published(tmp_path, "llama", "fp8-row")
    with pytest.raises(UserError, match=r"published in 8 bits.*--requantize"):
        LLM(reference.folder, weight_bits=4)
    with LLM(reference.folder, weight_bits=4, requantize=True, dtype="float32") as llm:
        assert llm.config.published is None
        scores = llm.score(prompt_token_ids=prompts()[:1])
    with LLM(reference.folder, weight_bits=16, dtype="float32") as llm:
        plain = llm.score(prompt_token_ids=prompts()[:1])
    expected = reference.logprobs(prompts()[0])
    np.testing.assert_allclose(plain[0].logprobs, expected, rtol=1e-4, atol=1e-4)
    assert scores[0].logprobs != plain[0].logprobs


@pytest.mark.parametrize("kind", ["fp8-block", "int8", "int4", "gptq", "awq"])
def test_a_config_alone_promises_the_same_bytes(tmp_path: Path, kind: str) -> None:
    folder = write_published(tmp_path, "llama", kind).folder
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    options = raw["quantization_config"]
    options |= {"group_size": 32, "modules_to_not_convert": ["lm_head"]}
    if kind.startswith("int"):
        weights = {"num_bits": int(kind[3]), "type": "int", "group_size": {"int4": 32}.get(kind)}
        options["config_groups"] = {"group_0": {"weights": weights}}
    path.write_text(json.dumps(raw))
    whole = shape_of(str(folder))
    (folder / "model.safetensors").unlink()
    promised = shape_of(str(folder))
    sizes = []
    for config in (whole, promised):
        assert config.published is not None
        formats = Policy(weight_bits=config.published.bits).formats("bfloat16")
        layers = model_spec(config).layers
        sizes.append([formats.weight(t).nbytes for layer in layers for t in layer.tensors])
    np.testing.assert_allclose(sizes[0], sizes[1], rtol=0.02)
