"""Folders as people have them: which files are the model, and what unusual ones mean. The reference
is transformers on the same folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flexgen_jax import LLM, Policy
from flexgen_jax.models import convert
from flexgen_jax.models.checkpoint import Checkpoint, read_folder_config
from flexgen_jax.models.convert import convert_folder
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.loading import open_model
from tests.helpers.models import prompts, write_checkpoint

POLICY = Policy(batch_size=8)


def changed(folder: Path, **fields: Any) -> Path:
    """The folder with other fields in its config; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def with_tensors(folder: Path, **more: np.ndarray) -> Path:
    """The folder with more tensors; the names' double underscores are dots."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in more.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def scores(folder: Path) -> list[float]:
    with LLM(folder, dtype="float32", policy=POLICY) as llm:
        return llm.score(prompt_token_ids=[prompts()[1]])[0].logprobs


def their_scores(folder: Path) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    ids = prompts()[1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        table = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [table[n, token].item() for n, token in enumerate(ids[1:])]


@pytest.fixture
def torch() -> Any:
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


def test_a_whole_file_comes_before_an_index(tmp_path: Path) -> None:
    folder, other = write_checkpoint(tmp_path / "m"), write_checkpoint(tmp_path / "other")
    expected = Checkpoint(folder).content("float32")
    old = load_file(other / "model.safetensors")
    save_file({n: x + 1 for n, x in old.items()}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(old, "model-00001-of-00001.safetensors")}
    for names in (index, {"weight_map": {"a": "model-00001-of-00002.safetensors"}}):
        (folder / "model.safetensors.index.json").write_text(json.dumps(names))
        assert Checkpoint(folder).content("float32") == expected


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["pytorch_model.bin"], "flexgen-jax convert"),
        (["adapter_config.json", "adapter_model.safetensors"], "LoRA"),
        (["model.Q4_K_M.gguf"], "GGUF"),
        (["consolidated.safetensors"], "consolidated.safetensors, which no"),
        ([], "get the model's safetensors"),
    ],
)
def test_what_a_folder_has_in_place_of_weights_is_said(
    tmp_path: Path, files: list[str], said: str
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    for name in files:
        (folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(folder)


def test_a_head_that_differs_from_the_table_is_used(tmp_path: Path, torch: Any) -> None:
    folder = write_checkpoint(tmp_path / "m", "untied")
    changed(folder, tie_word_embeddings=True)
    assert "differs from" in open_model(folder, dummy_weights=False, seed=0).notes[0]
    assert scores(folder) == pytest.approx(their_scores(folder), abs=1e-4)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    with_tensors(folder, lm_head__weight=tensors[name])
    assert Checkpoint(folder).config.tied_head
    assert scores(folder) == pytest.approx(their_scores(folder), abs=1e-4)


def test_a_head_that_differs_in_its_last_number_is_used(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    head = next(x for name, x in tensors.items() if name.endswith("embed_tokens.weight")).copy()
    head[-1, -1] += 1
    assert not Checkpoint(with_tensors(folder, lm_head__weight=head)).config.tied_head


def test_a_tied_table_may_be_stored_as_the_head_alone(tmp_path: Path, torch: Any) -> None:
    folder = write_checkpoint(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert scores(folder) == pytest.approx(their_scores(folder), abs=1e-4)


def test_a_missing_head_says_which_field_to_look_at(tmp_path: Path) -> None:
    folder = changed(write_checkpoint(tmp_path / "m"), tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r'"tie_word_embeddings": true'):
        Checkpoint(folder)


def test_useless_tensors_are_passed_over_in_one_line(tmp_path: Path) -> None:
    folder, one = write_checkpoint(tmp_path / "m"), np.ones(1, np.float32)
    names = ["score.weight", "mtp.layers.0.weight", "model.mtp.fc.weight", "v_head.summary.bias"]
    names += ["vision_tower.a.weight", "model.visual.b.weight", "model.layers.0.self_attn.k_scale"]
    names += ["model.layers.7.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.v_scale"]
    with_tensors(folder, **{name.replace(".", "__"): one for name in names})
    (note,) = Checkpoint(folder).notes
    assert f"passed over {len(names)} tensors" in note and "k_proj.v_scale" in note
    with_tensors(folder, model__unheard__weight=one)
    with pytest.raises(CheckpointError, match=r"model\.unheard\.weight' is not part of the model"):
        Checkpoint(folder)


def test_numbers_of_a_few_bits_without_a_config_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("fc1.weight"))
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc1.weight_scale_inv' is missing.*as FP8"):
        Checkpoint(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_dtype_that_the_config_does_not_say_is_the_weights(
    tmp_path: Path, dtype: str, torch: Any
) -> None:
    from transformers import AutoModelForCausalLM

    folder = changed(write_checkpoint(tmp_path / "m"), torch_dtype=None)
    tensors = load_file(folder / "model.safetensors")
    target = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    narrow = {name: x.astype(target) for name, x in tensors.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder).dtype
    assert f"torch.{read_folder_config(folder).dtype}" == str(theirs) == f"torch.{dtype}"


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        ({"rope_type": "default"}, 64),
    ],
)
def test_the_limit_is_what_the_positions_allow(rope: dict[str, Any], most: int) -> None:
    from flexgen_jax.models.families import read_config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 9}
    raw = {**sizes, "model_type": "qwen2", "num_attention_heads": 4, "max_position_embeddings": 64}
    for name in ("rope_scaling", "rope_parameters"):
        config = read_config({**raw, name: {"rope_theta": 1e4, **rope}})
        assert config.max_positions == most


def test_yarn_beyond_the_trained_positions_is_that_of_transformers(
    tmp_path: Path, torch: Any
) -> None:
    from tests.helpers.families import Reference

    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    more = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4, **rope}}
    reference = Reference(tmp_path, "qwen2", 0, **more)
    ids = [int(x) for x in np.random.default_rng(0).integers(3, 90, 150)]
    with LLM(tmp_path, dtype="float32", policy=POLICY) as llm:
        ours = llm.score(prompt_token_ids=[ids])[0].logprobs
    assert ours == pytest.approx(list(reference.logprobs(ids)), abs=1e-3)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_that_are_stored_together_are_read(tmp_path: Path, family: str, torch: Any) -> None:
    from tests.helpers.families import Reference

    reference = Reference(tmp_path, family, 0)
    expected = Checkpoint(tmp_path)
    reference.model.save_pretrained(tmp_path, save_original_format=False)
    fused = Checkpoint(tmp_path)
    from flexgen_jax.models.spec_of_config import model_spec

    for tensor in model_spec(fused.config).tensors.values():
        rows = tensor.shape[0]
        first = min(1, rows - 1)
        both = [source.read(tensor, first, rows, "float32") for source in (expected, fused)]
        assert np.array_equal(*both), tensor.key


def test_convert_copies_what_chat_and_generation_need(tmp_path: Path, torch: Any) -> None:
    source = write_checkpoint(tmp_path / "m")
    tensors = {n: torch.tensor(x) for n, x in load_file(source / "model.safetensors").items()}
    name = next(name for name in tensors if name.endswith("fc1.weight"))
    tensors[name] = tensors[name].T.contiguous().T  # in memory column by column
    torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (source / "model.safetensors").unlink()
    others = ["chat_template.jinja", "generation_config.json", "tekken.json", "vocab.spm"]
    for other in others:
        (source / other).write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("x")
    target = tmp_path / "out"
    convert_folder(source, target)
    assert {*others, "config.json", "tokenizer.json"} < {p.name for p in target.iterdir()}
    assert (target / "additional_chat_templates" / "rag.jinja").read_text() == "x"
    assert not [p.name for p in target.iterdir() if p.suffix in (".bin", ".part")]
    converted = load_file(target / "model.safetensors")
    assert all(np.array_equal(converted[n], x.numpy()) for n, x in tensors.items())


def test_convert_has_one_tensor_in_memory(
    tmp_path: Path, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "m")
    tensors = {f"model.layers.{n}.x": torch.ones(4 << 20).T for n in range(16)}  # 16 MiB each
    torch.save(tensors, source / "pytorch_model.bin")
    tensors.clear()
    held, pieces = [], convert._pieces

    def anonymous() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10

    def watched(tensor: Any) -> Iterator[memoryview]:
        yield from pieces(tensor)
        held.append(anonymous())

    monkeypatch.setattr(convert, "_pieces", watched)
    before = anonymous()
    convert_folder(source, tmp_path / "out")
    assert len(held) == 16
    assert max(held) - before < 64 << 20  # of 256 MiB


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", "it is an adapter"),
        ("model-Q4_K_M.gguf", "name one of them, --model .*model-Q4_K_M.gguf"),
        ("params.json", "Mistral's or Meta's own names"),
    ],
)
def test_a_folder_without_a_model_is_told_what_it_has(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(CheckpointError, match=f"has no config.json; .*{said}"):
        Checkpoint(tmp_path)


def test_an_adapter_next_to_a_model_is_noted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert not Checkpoint(folder).notes
    (folder / "adapter_config.json").write_text("{}")
    assert any("not applied: it has no weights" in note for note in Checkpoint(folder).notes)
