"""Special tokens come from several files; transformers on the same folder is the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.models.chat import ChatTemplate
from flexgen_jax.models.loading import open_model
from flexgen_jax.models.special_tokens import read_special_tokens
from flexgen_jax.models.tokenizer import Tokenizer
from tests.helpers.models import byte_tokenizer, write_checkpoint

TEXTS = ["abc", "a<|im_end|>b", "<s>x</s>", " a ", "<tool>c<|x|>", "<|x|> d"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def folder_with(
    folder: Path,
    config: dict[str, Any] | None = None,
    mapped: dict[str, Any] | None = None,
    words: tuple[str, ...] = (),
    marked: bool = True,
) -> Path:
    """A folder with a tokenizer of characters, and `words`; marked: whether tokenizer.json marks
    its special tokens."""
    folder.mkdir(exist_ok=True)
    raw = byte_tokenizer()
    for word in words:
        raw["model"]["vocab"][word] = len(raw["model"]["vocab"])
    if not marked:
        raw["added_tokens"] = []
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | (config or {})))
    if mapped is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(mapped))
    return folder


IM_END = "<|im_end|>"
CASES: dict[str, dict[str, Any]] = {
    "in the config": {"config": {"bos_token": "<s>", "eos_token": "</s>"}},
    "in the map alone": {"mapped": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}},
    "in both, and they differ": {
        "config": {"eos_token": "</s>"},
        "mapped": {"eos_token": IM_END},
        "words": (IM_END,),
    },
    "not marked": {"config": {"bos_token": "<s>", "eos_token": "</s>"}, "marked": False},
    "a list of more": {"config": {"extra_special_tokens": [IM_END]}, "words": (IM_END,)},
    "an object of more": {
        "config": {"extra_special_tokens": {"end_token": IM_END}},
        "words": (IM_END,),
    },
    "additional": {
        "mapped": {"additional_special_tokens": [IM_END, "<tool>"]},
        "words": (IM_END, "<tool>"),
    },
    "of other roles": {"config": {"tool_token": "<tool>"}, "words": ("<tool>",)},
    "with blanks": {
        "config": {
            "added_tokens_decoder": {
                "96": {"content": "<|x|>", "lstrip": True, "rstrip": True, "special": True}
            }
        },
        "words": ("<|x|>",),
    },
    "not in the vocabulary": {"config": {"extra_special_tokens": [IM_END]}},
    "bos is asked for": {"config": {"bos_token": "<s>", "add_bos_token": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_texts_and_ids_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = folder_with(tmp_path / "m", **CASES[case])
    ours, theirs = Tokenizer(folder, None), transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "hi"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False)
    assert ChatTemplate(folder).render(messages) == rendered
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_roles_that_only_the_map_has_are_known_beside_a_list_of_added_tokens(
    tmp_path: Path,
) -> None:
    added = {"2": {"content": "</s>", "special": True}}
    config = {"added_tokens_decoder": added, "eos_token": "</s>"}
    folder = folder_with(tmp_path / "m", config, {"bos_token": "<s>", "eos_token": "<unk>"})
    assert read_special_tokens(folder).texts == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_tokenizers_end_token_ends_texts(tmp_path: Path) -> None:
    """The greedy text of a model that neither config names its end token for ends there."""
    folder = write_checkpoint(tmp_path / "m")
    params = SamplingParams(max_tokens=30, temperature=0)
    with LLM(folder, dtype="float32", policy=Policy(batch_size=1)) as llm:
        (whole,) = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=params)
    token = whole.token_ids[4]
    folder_with(folder, {"eos_token": chr(token + 28)})
    (note,) = open_model(folder, dummy_weights=False, seed=0).notes
    assert f"id {token}" in note and "is used as well" in note
    with LLM(folder, dtype="float32", policy=Policy(batch_size=1)) as llm:
        (cut,) = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=params)
    first = whole.token_ids.index(token)
    assert cut.token_ids == whole.token_ids[: first + 1] and cut.finish_reason == "stop"


def test_a_rendered_text_gets_no_second_beginning(tmp_path: Path) -> None:
    raw = byte_tokenizer()
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer(tmp_path, None)
    assert tokenizer.encode("ab") == tokenizer.encode("<s>ab") == [0, 69, 70]
    assert tokenizer.encode("<s>ab", is_whole=True) == [0, 69, 70]
    assert tokenizer.encode("<s><s>ab") == [0, 0, 69, 70]
