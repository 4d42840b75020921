"""Tests parity with Hugging Face transformers, where PyTorch is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flexgen_jax import LLM, Policy, SamplingParams  # noqa: E402
from flexgen_jax.models.checkpoint import CheckpointError  # noqa: E402
from flexgen_jax.models.convert import convert_folder  # noqa: E402
from flexgen_jax.models.loading import shipped_model  # noqa: E402
from flexgen_jax.models.tokenizer import Tokenizer  # noqa: E402
from tests.helpers.models import BASE, VARIANTS, byte_tokenizer, prompts  # noqa: E402

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
torch.set_num_threads(1)  # for tiny models more of them only get into each other's way


class Reference:
    """A tiny random model that transformers itself saved."""

    def __init__(self, folder: Path, variant: str) -> None:
        import json

        torch.manual_seed(0)
        config = transformers.OPTConfig(**BASE | VARIANTS[variant])
        self.model = transformers.OPTForCausalLM(config).eval()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        self.model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
        self.folder = folder

    @cached_property
    def tokens(self) -> list[list[int]]:
        return [self.greedy(ids) for ids in prompts()]

    def greedy(self, ids: list[int]) -> list[int]:
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
        return out[0, len(ids) :].tolist()

    def logprobs(self, ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0].double()
        table = torch.log_softmax(logits, -1).numpy()
        return table[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Returns a function that gives the reference of a variant; each is made when it is first asked
    for, since a test worker may see only some."""
    root = tmp_path_factory.mktemp("transformers")
    return cache(lambda variant: Reference(root / variant, variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(references: Callable[[str], Reference], variant: str) -> None:
    """Log-probabilities are the logits minus one constant per row."""
    reference = references(variant)
    with LLM(reference.folder, dtype="float32", policy=Policy(batch_size=8)) as llm:
        scores = llm.score(prompt_token_ids=prompts())
    for ids, score in zip(prompts(), scores, strict=True):
        np.testing.assert_allclose(score.logprobs, reference.logprobs(ids), rtol=1e-4, atol=1e-5)


def test_shipped_model_and_tokenizer() -> None:
    folder = shipped_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(folder, bos_id=2)
    text = "The people of the United States -- naïve, 1776!"
    assert ours.encode(text) == tokenizer(text).input_ids
    assert ours.decode(ours.encode(text)) == text
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer(text, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=16, min_new_tokens=16, do_sample=False)
    with LLM(dtype="float32") as llm:
        found = llm.generate(text, SamplingParams(16, temperature=0, ignore_eos=True))[0]
    assert found.token_ids == expected[0, ids.input_ids.shape[1] :].tolist()


def test_convert(references: Callable[[str], Reference], tmp_path: Path) -> None:
    """A .bin checkpoint in two shards gives unchanged tokens after its conversion."""
    import json

    reference = references("untied")
    source = tmp_path / "bin"
    source.mkdir()
    state = reference.model.state_dict()
    where = {}
    for number in (1, 2):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        part = {k: v for i, (k, v) in enumerate(state.items()) if i % 2 == number - 1}
        torch.save(part, source / name)
        where |= dict.fromkeys(part, name)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_text((reference.folder / name).read_text())
    written = convert_folder(source, tmp_path / "out")
    assert len(written) == 2
    assert not list((tmp_path / "out").glob("*.part"))
    with LLM(tmp_path / "out", dtype="float32") as llm:
        results = llm.generate(prompt_token_ids=prompts(), sampling_params=GREEDY)
    assert [result.token_ids for result in results] == reference.tokens


def test_convert_refuses_code(references: Callable[[str], Reference], tmp_path: Path) -> None:
    """Unpickling would run code; the restricted loader does not."""
    import os

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/owned",)

    source = tmp_path / "bin"
    source.mkdir()
    folder = references("base").folder
    (source / "config.json").write_text((folder / "config.json").read_text())
    torch.save({"x": Evil()}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        convert_folder(source, tmp_path / "out")
    assert not (tmp_path / "owned").exists()
