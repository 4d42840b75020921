"""Checkpoints in every form, and the errors that broken ones raise."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as FastTokenizer

from flexgen_jax import LLM, Policy
from flexgen_jax.models import tensors
from flexgen_jax.models.checkpoint import Checkpoint
from flexgen_jax.models.families import read_config
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.loading import open_model
from flexgen_jax.models.parts import ConfigError
from flexgen_jax.models.shapes import known_shape
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.models.weight_source import DummyWeights
from flexgen_jax.policy.placement import place_weights
from tests.helpers.models import BASE, write_checkpoint


def shard(folder: Path, pieces: int = 3) -> Path:
    """Splits a folder's single file into shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    where = {}
    for number in range(pieces):
        name = f"model-{number + 1:05d}-of-{pieces:05d}.safetensors"
        part = {k: tensors[k] for k in sorted(tensors)[number::pieces]}
        save_file(part, folder / name)
        where.update(dict.fromkeys(part, name))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def read_all(folder: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    checkpoint = Checkpoint(folder)
    tensors = model_spec(checkpoint.config).tensors
    return {key: checkpoint.read(t, 0, t.shape[0], dtype) for key, t in tensors.items()}


def change(folder: Path, **changes: np.ndarray | None) -> None:
    """Replaces tensors; None removes one. Dots are written as two underscores."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changes.items():
        if value is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, path)


def test_shards_and_prefixes_read_the_same(tmp_path: Path) -> None:
    single = read_all(write_checkpoint(tmp_path / "a"))
    sharded = read_all(shard(write_checkpoint(tmp_path / "b")))
    bare = write_checkpoint(tmp_path / "c")
    tensors = load_file(bare / "model.safetensors")
    bare_tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(
        bare_tensors | {"lm_head.weight": tensors["model.decoder.embed_tokens.weight"]},
        bare / "model.safetensors",
    )
    for other in (sharded, read_all(bare)):
        assert single.keys() == other.keys()
        assert all(np.array_equal(single[key], other[key]) for key in single)


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_dtypes(tmp_path: Path, stored: type, dtype: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    tensors = {k: v.astype(stored) for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    key = "decoder.1.mlp.up.kernel"
    found = read_all(folder, dtype)[key]
    expected = tensors["model.decoder.layers.1.fc1.weight"].astype(found.dtype)
    assert found.dtype.name == dtype
    np.testing.assert_array_equal(found, expected)


def test_rows_are_read_by_range(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "m"))
    tensor = model_spec(checkpoint.config).tensors["embedding.tokens"]
    whole = checkpoint.read(tensor, 0, tensor.shape[0], "float32")
    np.testing.assert_array_equal(checkpoint.read(tensor, 7, 19, "float32"), whole[7:19])


NAME = "model__decoder__layers__1__fc1__weight"


def test_missing_extra_and_misshaped_tensors_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    change(folder, **{NAME: None})
    with pytest.raises(CheckpointError, match=r"layers\.1\.fc1\.weight' is missing"):
        Checkpoint(folder)
    change(folder, **{NAME: np.zeros((64, 31), np.float32)})
    with pytest.raises(CheckpointError, match=r"fc1\.weight' has shape \(64, 31\)"):
        Checkpoint(folder)
    change(folder, **{NAME: np.zeros((64, 32), np.float32), "surprise": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match="'surprise' is not part"):
        Checkpoint(folder)
    change(folder, surprise=None, **{NAME: np.zeros((64, 32), np.int32)})
    with pytest.raises(CheckpointError, match="I32"):
        Checkpoint(folder)


@pytest.mark.parametrize("cut", [4, 200, -100])
def test_truncated_shard_is_named(tmp_path: Path, cut: int) -> None:
    folder = shard(write_checkpoint(tmp_path / "m"))
    path = folder / "model-00002-of-00003.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.safetensors: (truncated|corrupt)"):
        Checkpoint(folder)
    if cut < 0:
        with pytest.raises(CheckpointError, match="truncated: tensor 'model"):
            Checkpoint(folder)


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}']
)
def test_corrupt_header(tmp_path: Path, header: bytes) -> None:
    folder = write_checkpoint(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "outside", ["../secret.safetensors", "/etc/passwd", "..", "a/b.safetensors"]
)
def test_index_pointing_outside(tmp_path: Path, outside: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": {"model.decoder.embed_tokens.weight": outside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        Checkpoint(folder)


def test_folder_without_config_and_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(
        CheckpointError, match=r"'mamba' is not supported: .* a recurrent state; supported: opt"
    ):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        Checkpoint(tmp_path)


def test_bin_checkpoints_are_pointed_to_convert(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="flexgen-jax convert"):
        Checkpoint(folder)


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_config_errors_name_the_field(field: str) -> None:
    missing = {k: v for k, v in BASE.items() if k != field}
    with pytest.raises(ConfigError, match=field):
        read_config(missing)
    with pytest.raises(ConfigError, match=field):
        read_config(BASE | {field: -3})


def test_unknown_shape_lists_the_known() -> None:
    with pytest.raises(
        ConfigError, match=r"opt-9b.*did you mean facebook/opt-.*flexgen-jax models"
    ):
        known_shape("facebook/opt-9b")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("125m", 125_239_296),
        ("350m", 331_196_416),
        ("1.3b", 1_315_758_080),
        ("2.7b", 2_651_596_800),
        ("6.7b", 6_658_473_984),
        ("13b", 12_853_473_280),
        ("30b", 29_974_540_288),
        ("66b", 65_719_701_504),
        ("175b", 174_604_468_224),
    ],
)
def test_known_shapes_have_as_many_parameters_as_in_transformers(
    name: str, parameters: int
) -> None:
    assert model_spec(known_shape(f"facebook/opt-{name}")).num_parameters == parameters


def test_dummy_weights_depend_on_seed_and_key_alone() -> None:
    config = read_config(BASE | {"vocab_size": 600})
    tensors = model_spec(config).tensors
    table = tensors["embedding.tokens"]
    source = DummyWeights(config, seed=1)
    whole = source.read(table, 0, 600, "float32")
    for rows in (slice(250, 530), slice(300, 400), slice(512, 600)):
        found = source.read(table, rows.start, rows.stop, "float32")
        np.testing.assert_array_equal(found, whole[rows])
    bias, scale = (tensors[f"decoder.0.mlp_norm.{name}"] for name in ("bias", "scale"))
    np.testing.assert_array_equal(source.read(bias, 3, 8, "float32"), np.zeros(5))
    np.testing.assert_array_equal(source.read(scale, 3, 8, "float32"), np.ones(5))
    assert whole.std() == pytest.approx(0.019, rel=0.03)
    assert not np.array_equal(whole, DummyWeights(config, seed=2).read(table, 0, 600, "float32"))
    kernels = [tensors[f"decoder.{i}.mlp.up.kernel"] for i in range(2)]
    first, second = (source.read(t, 0, 64, "float32") for t in kernels)
    assert not np.array_equal(first, second)


def test_fingerprint_changes_with_the_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    before = Checkpoint(folder).fingerprint("float32")
    assert Checkpoint(folder).fingerprint("float32") == before
    assert Checkpoint(folder).fingerprint("bfloat16") != before
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert Checkpoint(folder).fingerprint("float32") != before


def test_a_byte_between_samples_changes_fingerprint_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With size and time of modification kept; a copy has an equal content. What is known of a file
    is not read again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_checkpoint(
        tmp_path / "m", hidden_size=256, ffn_dim=1024, word_embed_proj_dim=256
    )
    file, opened = folder / "model.safetensors", Checkpoint(folder)
    before, times = (opened.fingerprint("float32"), opened.content("float32")), file.stat()
    shutil.copytree(folder, tmp_path / "copy")
    assert Checkpoint(tmp_path / "copy").content("float32") == before[1]
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert Checkpoint(folder).content("float32") == before[1]
    sampled = times.st_size * 128 // (tensors.FINGERPRINT_SAMPLES + 1)
    with open(file, "r+b") as opened_file:
        opened_file.seek(sampled + 4096 + 10)
        byte = opened_file.read(1)[0]
        opened_file.seek(-1, os.SEEK_CUR)
        opened_file.write(bytes([byte ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = Checkpoint(folder)
    assert tensors._sampled_hash(file) == tensors._sampled_hash(tmp_path / "copy" / file.name)
    assert changed.fingerprint("float32") != before[0]
    assert changed.content("float32") != before[1]


def test_a_file_that_is_replaced_is_not_taken_for_the_one_that_was_opened(tmp_path: Path) -> None:
    """Otherwise, stored weights of one file would be found under the other's fingerprint."""
    folder = write_checkpoint(tmp_path / "m")
    opened = Checkpoint(folder)
    first = opened.fingerprint("float32")
    assert opened.fingerprint("float32") == first
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors, tmp_path / "new", metadata={"format": "pt"})
    (tmp_path / "new").replace(file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed after it was opened"):
        opened.fingerprint("float32")


def test_a_hub_folder_without_safetensors_says_how_to_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"hf download some/model .*convert SRC DST"):
        LLM("some/model")


def test_a_tokenizers_own_truncation_and_padding_are_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    text = "a prompt that is longer than that"
    expected = Tokenizer(folder, None).encode(text)
    whole = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    whole.enable_truncation(5)
    whole.enable_padding(length=64)
    whole.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder, None).encode(text) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("percent", [(0, 0), (0, 100), (50, 0)])
def test_loading_holds_less_than_two_layers(tmp_path: Path, percent: tuple[int, int]) -> None:
    """Loading allocates less than two layers with NumPy beside the tensors' homes in memory."""
    sizes = {"hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048}
    folder = write_checkpoint(tmp_path / "m", num_hidden_layers=6, **sizes)
    policy = Policy.from_percent(*percent, 100, 0, 100, 0)
    spec = model_spec(Checkpoint(folder).config)
    homes = place_weights(spec, "float32", policy)
    in_memory = sum(
        tensor.nbytes("float32") for key, tensor in spec.tensors.items() if homes[key] != "disk"
    )
    with LLM(folder, policy=policy, dtype="float32", offload_dir=tmp_path / "offload") as llm:
        tracemalloc.start()
        llm.warm_up(4, 1, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak - in_memory < 2 * spec.decoders[0].nbytes("float32")


def test_without_a_network_the_advice_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("set local_files_only to False\nand so on")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match="hf download some/model --local-dir") as caught:
        open_model("some/model", dummy_weights=False, seed=0)
    assert "\n" not in str(caught.value)


def test_only_the_model_s_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository may have the weights twice, or in other formats."""
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    names = dict.fromkeys(load_file(tmp_path / "a.safetensors"), "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    files = ["config.json", "original/params.json", "tokenizer.json", "merges.txt", "a.safetensors"]
    files += [
        "consolidated.safetensors",
        "original/model.safetensors",
        "onnx/x.json",
        "b.safetensors",
    ]
    files += ["additional_chat_templates/rag.jinja", "pytorch_model.bin"]
    files += ["modules.json", "1_Pooling/config.json"]
    fetched: set[str] = set()

    def fetch(_: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        from huggingface_hub.utils import filter_repo_objects

        fetched.update(
            filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    open_model("some/model", dummy_weights=False, seed=0)
    assert fetched == {
        "config.json",
        "tokenizer.json",
        "merges.txt",
        "a.safetensors",
        "additional_chat_templates/rag.jinja",
        "modules.json",
        "1_Pooling/config.json",
    }
