"""Known shapes: their parameters are the published ones, and every module declares what the spec
says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax.layers.decoder import DecoderLayer
from flexgen_jax.layers.embedding import Embedding, Head
from flexgen_jax.layers.experts import Beside, Router
from flexgen_jax.layers.mlp import MLP
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.formats.decoding import decoded
from flexgen_jax.models.formats.storage import Storage
from flexgen_jax.models.parts import ConfigError
from flexgen_jax.models.shapes import SHAPES, known_shape
from flexgen_jax.models.spec import LayerSpec
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.weight_source import DummyWeights
from tests.helpers.kernels import XLA

PARAMETERS = {
    "HuggingFaceTB/SmolLM-135M": 134_515_008,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-3-1b-pt": 999_885_952,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V2": 235_741_434_880,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
    "LiquidAI/LFM2-1.2B": 1_170_340_608,
    "LiquidAI/LFM2-8B-A1B": 8_339_929_856 + 22 * 32,  # corrections of the routers, not counted
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen/Qwen3.5-27B": 26_895_998_464,
    "Qwen/Qwen3.6-35B-A3B": 34_660_610_688,
    "google/gemma-4-26B-A4B-it": 25_233_141_760 + 30,  # the factors of its layers are no parameters
    "google/gemma-4-31B-it": 30_697_345_280 + 60,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert model_spec(known_shape(name)).num_parameters == PARAMETERS[name]


@pytest.mark.few(25)
@pytest.mark.parametrize("name", SHAPES)
def test_modules_declare_what_the_spec_says(name: str) -> None:
    """Without making any array."""
    config = known_shape(name)
    spec, key = model_spec(config), jax.random.key(0)
    ids, rows = jnp.zeros((1, 2), jnp.int32), Rows.of(np.zeros(1), 2)
    hidden = jax.ShapeDtypeStruct((1, 2, config.hidden_size), jnp.float32)
    _same(spec.embedding, lambda: Embedding(config, XLA).init(key, ids, jnp.int32(0), rows))
    _same(spec.head, lambda x: Head(config, XLA).init(key, x), hidden)
    for layer, _ in spec.decoder_kinds:
        module, x = DecoderLayer(config, layer.decoder, XLA), hidden
        if layer.attends:
            declared = _shapes(lambda x, m=module: m.init(key, x, rows, method="prefill"), x)
        else:
            state = tuple(jnp.zeros(leaf.array_shape(1)) for leaf in layer.replaced)
            given = ((), state, jnp.int32(0), rows, 2)
            declared = _shapes(lambda x, m=module, g=given: m.init(key, x, *g, method="mix"), x)
        if layer.experts is not None:
            router = Router(config, layer.experts, XLA)
            flat = jax.ShapeDtypeStruct((2, config.hidden_size), jnp.float32)
            declared |= _shapes(lambda x, m=router: m.init(key, x), flat)
            if layer.experts.routing.is_beside:
                ending = Beside(config, layer.experts, XLA)
                declared |= _shapes(lambda x, m=ending: m.init(key, x, x), flat)
            block = MLP(layer.experts.expert, XLA)
            mine = _shapes(lambda x, m=block: m.init(key, x), flat)
            for number in range(layer.experts.count):
                declared |= {f"experts.{number}.{path}": shape for path, shape in mine.items()}
        assert declared == {tensor.path: tensor.shape for tensor in layer.tensors}


def _same(layer: LayerSpec, init: object, *args: object) -> None:
    assert _shapes(init, *args) == {tensor.path: tensor.shape for tensor in layer.tensors}


def _shapes(init: object, *args: object) -> dict[str, tuple[int, ...]]:
    variables = jax.eval_shape(init, *args)
    leaves = jax.tree_util.tree_flatten_with_path(variables.get("params", {}))[0]
    return {".".join(k.key for k in path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "MiniMaxAI/MiniMax-M2"])
def test_random_numbers_of_a_published_format_are_small(name: str) -> None:
    config = known_shape(name)
    tensor = next(t for t in model_spec(config).decoders[0].large if t.published is not None)
    leaves = DummyWeights(config).read_packed(tensor, 0, 256)
    storage = Storage((256, *tensor.shape[1:]), "float32", tensor.published)
    assert 0.001 < float(np.std(decoded(leaves, storage))) < 0.1


def test_a_name_without_its_owner_is_enough() -> None:
    assert known_shape("llama-3.1-8b") == known_shape("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "AQLM.*--weight-bits 4"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"hidden_act": "mish"}, "mish"),
        ({"model_type": "lama"}, "the closest is llama"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, object], said: str) -> None:
    from flexgen_jax.models.families import read_config

    with pytest.raises(ConfigError, match=said):
        read_config({**SHAPES["meta-llama/Llama-2-7b-hf"], **change})
