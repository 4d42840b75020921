"""LoRA adapters in peft's files: what they compute, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexgen_jax import LLM, SamplingParams, UserError
from flexgen_jax.models.folder import CheckpointError
from flexgen_jax.models.loading import open_model, shape_of
from flexgen_jax.models.spec_of_config import model_spec
from tests.helpers.adapters import Adapted
from tests.helpers.families import Reference
from tests.helpers.models import prompts

IDS = prompts()[1]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("llama"), "llama", 0)


def scores(model: Path, dtype: str = "float32", **options: Any) -> list[float]:
    with LLM(model, dtype=dtype, **options) as llm:
        return llm.score(prompt_token_ids=[IDS])[0].logprobs


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"},
        {"r": 4, "use_rslora": True, "target_modules": ["q_proj"], "layers_to_transform": [1]},
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 6, "v_proj": 2},
            "alpha_pattern": {"down_proj": 3, r"layers\.0\..*q_proj": 5},
        },
        {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "norm"]},
    ],
    ids=["all", "rslora", "patterns", "saved"],
)
def test_results_are_those_of_peft(
    llama: Reference, tmp_path: Path, options: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(llama.folder)
    adapted = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name:
            parameter.data *= 1.5
    adapted.save_pretrained(tmp_path)
    reference = Reference.__new__(Reference)
    reference.model = adapted.eval()
    found = scores(llama.folder, adapter=str(tmp_path))
    np.testing.assert_allclose(found, reference.logprobs(IDS), rtol=1e-5, atol=1e-5)
    assert np.abs(found - llama.logprobs(IDS)).max() > 1e-3


def test_the_stored_weights_stay_as_they_are(llama: Reference, tmp_path: Path) -> None:
    """Beside weights in 4 bits an adapter is exact: the results differ from those with 16 bits as
    much as without it."""
    adapted = Adapted(llama, tmp_path / "a", r".*q_proj")
    path = str(adapted.path)
    with_it = np.subtract(scores(llama.folder, adapter=path), adapted.logprobs(IDS))
    assert np.abs(with_it).max() < 1e-5
    plain = open_model(llama.folder, False, 0)
    model = open_model(llama.folder, False, 0, adapters=[path])
    assert model.source.fingerprint("float32") == plain.source.fingerprint("float32")
    assert model.source.content("float32") != plain.source.content("float32")
    narrow = scores(llama.folder, "bfloat16", adapter=path)
    np.testing.assert_allclose(narrow, adapted.logprobs(IDS), atol=0.2)
    kernel = model_spec(model.config).tensors["decoder.0.attention.q.kernel"]
    low_rank = model_spec(model.config).tensors["decoder.0.attention.q.lora_a"]
    bits = [tensor.storage("bfloat16", bits=4).format for tensor in (kernel, low_rank)]
    assert bits[0] is not None
    assert bits[1] is None
    packed = scores(llama.folder, adapter=path, weight_bits=4)
    without = scores(llama.folder, weight_bits=4)
    losses = np.subtract(packed, adapted.logprobs(IDS)), np.subtract(without, llama.logprobs(IDS))
    assert np.abs(losses[0]).mean() < 3 * np.abs(losses[1]).mean()


def test_an_adapter_is_found_beside_its_model_and_finds_it(
    llama: Reference, tmp_path: Path
) -> None:
    adapted = Adapted(llama, tmp_path / "a", r".*q_proj")
    config = json.loads((adapted.path / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(llama.folder)
    (adapted.path / "adapter_config.json").write_text(json.dumps(config))
    beside = tmp_path / "both"
    beside.mkdir()
    for folder in (llama.folder, adapted.path):
        for file in folder.iterdir():
            (beside / file.name).write_bytes(file.read_bytes())
    expected = adapted.logprobs(IDS)
    for place in (adapted.path, beside):
        np.testing.assert_allclose(scores(place), expected, atol=1e-5)
        assert shape_of(str(place)).adapters == open_model(str(place), False, 0).config.adapters
    with pytest.raises(UserError, match="has an adapter already"):
        LLM(beside, adapter=str(adapted.path))


def test_kept_texts_and_jobs_know_the_adapter(tmp_path: Path) -> None:
    """The KV cache of one is not another's, and a scale is a part of it."""
    llama = Reference(tmp_path / "long", "llama", 0, max_position_embeddings=512)
    ids = np.random.default_rng(0).integers(3, 96, 300).tolist()
    adapted = Adapted(llama, tmp_path / "a", r".*[kv]_proj")
    options = {"kv_store": "10MB", "kv_store_dir": tmp_path / "kv"}
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    contents = set()

    def check(expected: list[int] | None, **adapter: Any) -> None:
        for _ in range(2):
            with LLM(llama.folder, dtype="float32", **options, **adapter) as llm:
                (result,) = llm.generate(prompt_token_ids=[ids], sampling_params=params)
                contents.add(llm.fingerprint)
            assert expected is None or result.token_ids == expected

    check(llama.greedy(ids, 6))
    check(adapted.greedy(ids, 6), adapter=adapted.path)
    check(llama.greedy(ids, 6))
    config = json.loads((adapted.path / "adapter_config.json").read_text()) | {"lora_alpha": 50}
    (adapted.path / "adapter_config.json").write_text(json.dumps(config))
    check(None, adapter=adapted.path)
    assert len(contents) == 3


def test_vectors_are_those_of_the_chosen_adapter(llama: Reference, tmp_path: Path) -> None:
    adapted = Adapted(llama, tmp_path / "a", r".*q_proj")
    with LLM(llama.folder, dtype="float32", adapter=f"b={adapted.path}") as llm:
        found = llm.embed(prompt_token_ids=[IDS, IDS], adapter=["b", None], normalize=False)
    for vector, reference in zip(found, (adapted, llama), strict=True):
        states = reference.model.model(_tensor([IDS])).last_hidden_state[0, -1]
        np.testing.assert_allclose(vector, states.detach().numpy(), rtol=1e-4, atol=1e-4)


def test_modules_of_towers_are_passed_over(llama: Reference, tmp_path: Path) -> None:
    adapted = Adapted(llama, tmp_path / "a", r".*q_proj")
    tensors = load_file(adapted.path / "adapter_model.safetensors")
    for name in ("vision_tower.encoder.layers.0.q_proj.lora_A", "visual.q.lora_B"):
        for side in "AB":
            key = f"base_model.model.model.{name[:-1]}{side}.weight"
            tensors[key] = np.zeros((2, 2), np.float32)
    tensors["base_model.model.score.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, adapted.path / "adapter_model.safetensors")
    found = scores(llama.folder, adapter=adapted.path)
    np.testing.assert_allclose(found, adapted.logprobs(IDS), rtol=1e-5, atol=1e-5)


def test_a_kept_head_unties_a_tied_one(tmp_path: Path) -> None:
    tied = Reference(tmp_path / "tied", "llama", 0, tie_word_embeddings=True)
    adapted = Adapted(tied, tmp_path / "a", r".*q_proj")
    tensors = load_file(adapted.path / "adapter_model.safetensors")
    head = np.random.default_rng(0).normal(0, 0.3, (96, tied.model.config.hidden_size)).astype("f4")
    tensors["base_model.model.lm_head.weight"] = head
    save_file(tensors, adapted.path / "adapter_model.safetensors")
    states = adapted.model.model(_tensor([IDS])).last_hidden_state[0].detach().double().numpy()
    logits = states @ head.T.astype("f8")
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = table[np.arange(len(IDS) - 1), IDS[1:]]
    np.testing.assert_allclose(
        scores(tied.folder, adapter=str(adapted.path)), expected, rtol=1e-5, atol=1e-5
    )
    del tensors["base_model.model.lm_head.weight"]
    tensors["base_model.model.model.embed_tokens.weight"] = head
    save_file(tensors, adapted.path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="replaces the embedding of"):
        LLM(tied.folder, adapter=str(adapted.path))


def _tensor(rows: list[list[int]]) -> Any:
    import torch

    return torch.tensor(rows)


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {
    f"{MODULE}.lora_A.weight": np.zeros((2, 32), np.float32),
    f"{MODULE}.lora_B.weight": np.zeros((32, 2), np.float32),
}


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"peft_type": "IA3"}, PAIR, "adapter_config.json: peft_type 'IA3' is not supported"),
        ({"use_dora": True}, PAIR, "use_dora True is not supported: merge"),
        ({"arrow_config": {"top_k": 2}}, PAIR, "arrow_config .* is not supported"),
        ({"init_lora_weights": "lora_ga"}, PAIR, "changes the model's own weights"),
        ({"bias": "all"}, PAIR, "bias 'all' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, PAIR, "changes the model's own weights"),
        ({"target_parameters": ["experts.up"]}, PAIR, "target_parameters .* is not supported"),
        ({}, {}, "has no matrices"),
        ({"lora_alpha": None}, PAIR, "lora_alpha or alpha_pattern is wrong"),
        ({"alpha_pattern": {"(": 2}}, PAIR, "lora_alpha or alpha_pattern is wrong"),
        ({"alpha_pattern": ["q_proj"]}, PAIR, "lora_alpha or alpha_pattern is wrong"),
        ({}, {name: x.astype(np.int32) for name, x in PAIR.items()}, "is I32 with shape"),
        ({}, {name: x[:0] for name, x in PAIR.items()}, "not a matrix of"),
        ({}, {name: x[0] for name, x in PAIR.items()}, "not a matrix of"),
        ({}, {name: PAIR[name] for name in [*PAIR][:1]}, "lora_B.weight' is missing"),
        ({}, {name: PAIR[name] for name in [*PAIR][1:]}, "has no lora_A"),
        ({}, {name: x.T for name, x in PAIR.items()}, "has shape .*, but the model requires"),
        (
            {},
            {name.replace("layers.0", "layers.9"): x for name, x in PAIR.items()},
            "'layers.9.self_attn.q_proj' is not a module of this model",
        ),
        (
            {},
            {
                name.replace("layers.0.self_attn.q_proj", "embed_tokens"): x
                for name, x in PAIR.items()
            },
            "'embed_tokens' is not a module",
        ),
        ({}, {**PAIR, f"{MODULE}.lora_embedding_A": np.zeros(2)}, "embeddings, biases and DoRA"),
        (
            {},
            {**PAIR, "base_model.model.other.weight": np.zeros(2)},
            "'other.weight' is not a tens",
        ),
        ({}, {**PAIR, "base_model.model.lm_head.weight": np.zeros(2)}, "has shape"),
    ],
)
def test_what_cannot_be_applied_is_named(
    llama: Reference, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], said: str
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(contiguous, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        open_model(llama.folder, False, 0, adapters=[str(tmp_path)])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["{a}", "{a}"], "several adapters need different names"),
        (["x={a}", "x={a}"], "several adapters need different names"),
        (["{a}/none"], "none does not exist"),
        (["x=~nobody/a"], "does not exist"),
        (["={a}"], "write it as NAME=PATH"),
        (["{a}/adapter_config.json"], "is not a folder"),
        (["{model}={a}"], "this is the model's own name"),
        (["{saved}", "x={a}"], "several adapters need different names"),
        (["y={saved}"], "give this adapter alone and without a name"),
        (["{empty}"], "has no adapter_config.json"),
        (["{bin}"], "save it with safe_serialization"),
    ],
)
def test_impossible_choices_of_adapters_are_errors(
    llama: Reference, tmp_path: Path, given: list[str], said: str
) -> None:
    folders = {name: tmp_path / name for name in ("a", "saved", "empty", "bin")}
    for folder in folders.values():
        folder.mkdir()
    for name in ("a", "saved", "bin"):
        (folders[name] / "adapter_config.json").write_text("{}")
    save_file(PAIR, folders["a"] / "adapter_model.safetensors")
    norm = {"base_model.model.model.norm.weight": np.ones(32, np.float32)}
    save_file(PAIR | norm, folders["saved"] / "adapter_model.safetensors")
    (folders["bin"] / "adapter_model.bin").touch()
    with pytest.raises(UserError, match=said):
        LLM(
            llama.folder,
            adapter=[text.format(**folders, model=llama.folder.name) for text in given],
        )


def test_texts_name_known_adapters(llama: Reference, tmp_path: Path) -> None:
    adapted = Adapted(llama, tmp_path / "a", r".*q_proj")
    params = SamplingParams(max_tokens=1)
    for options, known in (
        ({}, "there are none with names"),
        ({"adapter": f"b={adapted.path}"}, "b"),
    ):
        with LLM(llama.folder, dtype="float32", **options) as llm:
            with pytest.raises(UserError, match=f"adapter 'a' is not known: .*{known}"):
                llm.generate(prompt_token_ids=[IDS], sampling_params=params, adapter="a")
            with pytest.raises(UserError, match="1 prompts, but 2 adapters"):
                llm.generate(prompt_token_ids=[IDS], sampling_params=params, adapter=[None, None])
    with pytest.raises(UserError, match="cannot follow adapters"):
        LLM(llama.folder, adapter=f"b={adapted.path}", draft="self-4bit")
