"""Long prompts are prefilled in chunks, each of which attends to the KV blocks of those before."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.layers import programs
from flexgen_jax.layers.embedding import Head
from flexgen_jax.layers.programs import Programs
from flexgen_jax.layers.programs.table import apply
from flexgen_jax.layers.rotary import Rows
from flexgen_jax.models.families import read_config
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats
from flexgen_jax.models.weight_source import DummyWeights
from flexgen_jax.policy.shapes import Setting
from flexgen_jax.search.memory import workspace_bytes
from tests.helpers.kernels import CPU, XLA
from tests.helpers.models import BASE, write_checkpoint


@pytest.mark.slow
def test_logits_are_those_of_a_whole_prompt_of_2048_tokens() -> None:
    """With padding that ends within a chunk, in programs of XLA's code and of generated code."""
    config = read_config(BASE | {"max_position_embeddings": 2048})
    spec, formats = model_spec(config), Formats("float32")
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 96, (2, 2048)).astype(np.int32)
    first = np.array([0, 700], np.int32)
    rows = Rows.of(first, 2048)

    def weights(layer: int) -> dict[str, jax.Array]:
        """Large ones, so that attention prefers some tokens."""
        tensors = spec.layers[layer].tensors
        read = {t.path: DummyWeights(config).read(t, 0, t.shape[0], "float32") for t in tensors}
        return {
            t.path: jnp.asarray(read[t.path] * (1 if t.is_small else 12)).reshape(t.shape)
            for t in tensors
        }

    def logits(kernels: object, chunks: list[int]) -> np.ndarray:
        of_model, start, found = Programs(config, formats, kernels), 0, []
        blocks: list[list[object]] = [[] for _ in spec.decoders]
        for tokens in chunks:
            part, at = ids[:, start : start + tokens], np.int32(start)
            embed = of_model.get(programs.embed, rows=2, tokens=tokens)
            hidden, checks = embed(weights(0), part, at, rows)
            for number, layer in enumerate(spec.decoders):
                mine, shape = weights(number + 1), {"layer": layer, "rows": 2}
                if not start:
                    program = of_model.get(programs.prefill, **shape, cuts=(tokens,))
                    hidden, (block,), checks = program(mine, hidden, checks, rows)
                else:
                    project = of_model.get(
                        programs.project_chunk, **shape, tokens=tokens, asked=tokens
                    )
                    query, partial, block = project(mine, hidden, at, rows)
                    begin = 0
                    for earlier, length in zip(blocks[number], chunks, strict=False):
                        attend = of_model.get(
                            programs.attend_chunk, **shape, asked=tokens, tokens=length
                        )
                        partial = attend(partial, query, earlier, np.int32(begin), at, rows)
                        begin += length
                    finish = of_model.get(
                        programs.finish_chunk, **shape, tokens=tokens, asked=tokens
                    )
                    hidden, checks = finish(mine, hidden, checks, partial)
                blocks[number].append(block)
            assert checks[1] == 0
            found.append(hidden)
            start += tokens
        head = Head(config, kernels, jnp.float32)
        last = weights(len(spec.layers) - 1)
        return np.asarray(apply(head, last, jnp.concatenate(found, axis=1)))

    whole = logits(XLA, [2048])
    for kernels, chunks in ((XLA, [512] * 4), (CPU, [48, 1000, 1000])):
        found = logits(kernels, chunks)
        for row, begin in enumerate(first):
            np.testing.assert_allclose(found[row, begin:], whole[row, begin:], rtol=1e-4, atol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("rows", [1, 5])
def test_programs_of_chunks_need_no_more_than_is_counted(bits: int, rows: int) -> None:
    sizes = {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 512}
    config = read_config(BASE | sizes | {"max_position_embeddings": 2048})
    formats, tokens = Formats("bfloat16", bits, bits), 256
    of_model, layer = Programs(config, formats, CPU), model_spec(config).decoders[0]
    shape = {"layer": layer, "rows": rows, "tokens": tokens, "asked": tokens}
    of_model.get(programs.project_chunk, **shape)
    of_model.get(programs.attend_chunk, **shape)
    of_model.get(programs.finish_chunk, **shape)
    setting = Setting(config, "bfloat16", unified=True)
    counted = workspace_bytes(setting, formats, rows, tokens, is_chunked=True)
    assert of_model.workspace <= counted


@pytest.mark.slow
def test_a_plan_takes_smaller_chunks_where_nothing_else_fits(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 1024}
    folder = write_checkpoint(tmp_path / "m", **sizes, max_position_embeddings=4096)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for memory, chunks in (("1GB", {2048}), ("30MB", {512, 128})):
        with LLM(folder, dtype="float32", device_memory=memory, unified=False) as llm:
            llm.generate(prompt_token_ids=[[5] * 4000], sampling_params=params)
            assert llm.policy is not None
            assert llm.policy.prefill_chunk in chunks, memory


@pytest.mark.parametrize("chunk", [0, -3, 2.5, True])
def test_a_chunk_has_tokens(chunk: object) -> None:
    with pytest.raises(UserError, match="prefill_chunk must be a positive integer"):
        Policy(prefill_chunk=chunk)
