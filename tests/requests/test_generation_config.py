"""What a folder's generation_config.json asks for is done, as by transformers, or said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexgen_jax import LLM, Policy, SamplingParams
from flexgen_jax.errors import PromptError
from flexgen_jax.models.defaults import (
    DONE,
    UNDONE,
    UNDONE_SAMPLING,
    WITHOUT_EFFECT,
    SamplingDefaults,
    read_defaults,
)
from flexgen_jax.models.folder import CheckpointError
from tests.helpers.models import prompts, write_checkpoint

LENGTHS = (3, 14, 8, 16)
NEW = 24

RULES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "ngrams": {"no_repeat_ngram_size": 2},
    "ngrams of one": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[20], [30, 31], [5, 6, 7], [2]]},
    "suppressed": {"suppress_tokens": list(range(40, 60)), "begin_suppress_tokens": [70, 71]},
    "forced end": {"forced_eos_token_id": 9, "max_new_tokens": 7},
    "forced ends": {"forced_eos_token_id": [9, 11], "max_new_tokens": 5},
    "least new": {"min_new_tokens": 9, "eos_token_id": list(range(3, 90, 2))},
    "least": {"min_length": 12, "eos_token_id": list(range(3, 90, 2))},
    "most": {"max_length": 20},
    "all": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[21, 22]],
        "suppress_tokens": [33],
        "min_new_tokens": 4,
        "eos_token_id": [50, 60],
        "max_new_tokens": 11,
    },
}


def theirs(folder: Path) -> list[list[int]]:
    """The greedy tokens of transformers, prompt by prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.generation_config
    most = {} if config.max_new_tokens or config.max_length else {"max_new_tokens": NEW}
    tokens = []
    for ids in prompts(LENGTHS):
        row = torch.tensor([ids])
        made = model.generate(
            row, attention_mask=torch.ones_like(row), do_sample=False, pad_token_id=1, **most
        )
        tokens.append(made[0, len(ids) :].tolist())
    return tokens


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
def test_greedy_texts_follow_the_rules(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = write_checkpoint(tmp_path / "m")
    rules = {"eos_token_id": 2} | RULES[name]
    (folder / "generation_config.json").write_text(json.dumps(rules))
    expected = theirs(folder)
    most = None if {"max_new_tokens", "max_length"} & RULES[name].keys() else NEW
    with LLM(folder, dtype="float32", policy=Policy(batch_size=4)) as llm:
        found = llm.generate(
            prompt_token_ids=prompts(LENGTHS),
            sampling_params=SamplingParams(most, temperature=0),
        )
        assert [r.token_ids for r in found] == expected


def test_a_request_says_otherwise(tmp_path: Path) -> None:
    folder, plain = write_checkpoint(tmp_path / "m"), write_checkpoint(tmp_path / "plain")
    rules = {"repetition_penalty": 1.3, "max_new_tokens": 5, "min_p": 0.2, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(rules))
    own = SamplingParams(9, temperature=0, repetition_penalty=1.0)
    with LLM(folder, dtype="float32") as llm, LLM(plain, dtype="float32") as other:
        expected = other.generate(prompt_token_ids=prompts(), sampling_params=own)
        found = llm.generate(prompt_token_ids=prompts(), sampling_params=own)
        assert [r.token_ids for r in found] == [r.token_ids for r in expected]
        asked = llm.resolved(SamplingParams())
        assert (asked.max_tokens, asked.min_p, asked.repetition_penalty) == (5, 0.2, 1.3)
        assert llm.resolved(SamplingParams(temperature=1.0)).min_p == 0


def test_every_field_of_transformers_is_done_or_known() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {*transformers.GenerationConfig().to_dict(), *vars(transformers.GenerationConfig())}
    kinds = (DONE, WITHOUT_EFFECT, set(UNDONE), set(UNDONE_SAMPLING))
    assert {name for name in fields if sum(name in kind for kind in kinds) != 1} <= {
        "_original_object_hash"
    }


VALUES: dict[str, Any] = {
    "sequence_bias": [[[5], 2.0]],
    "exponential_decay_length_penalty": [5, 1.1],
    "watermarking_config": {"bias": 2.0},
    "constraints": [1],
    "force_words_ids": [[3]],
    "dola_layers": "low",
    "token_healing": True,
    "forced_bos_token_id": 5,
    "max_time": 3.0,
    "top_h": 0.4,
}


NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), 1),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p"), 1.0),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha", "epsilon_cutoff", "eta_cutoff"), 0.0),
    "encoder_no_repeat_ngram_size": 0,
    "token_healing": False,
}
"""Values that change nothing, by transformers' documentation of `GenerationConfig`."""


@pytest.mark.parametrize("name", [*UNDONE, *UNDONE_SAMPLING, "a_field_of_tomorrow"])
def test_what_is_not_done_is_said_once(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    value = VALUES.get(name, 3)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, name: value}))
    with LLM(folder, dtype="float32") as llm:
        assert capsys.readouterr().err.count(f"not supported and ignored: {name}") == 1
        llm.generate(prompt_token_ids=[[5]], sampling_params=SamplingParams(1))
        assert any(f"not supported and ignored: {name}" in note for note in llm.report()["notes"])
    for each in (None, NEUTRAL.get(name)):
        (folder / "generation_config.json").write_text(json.dumps({name: each}))
        assert read_defaults(folder).undone == ()


def test_rules_may_be_in_config_json_where_there_is_no_other_file(tmp_path: Path) -> None:
    """The reference is what transformers makes of the folder."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rules = {"repetition_penalty": 1.2, "max_length": 30, "num_beams": 2, "top_k": 7}
    folder = write_checkpoint(tmp_path / "m", **rules)
    found = read_defaults(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert found.sampling.repetition_penalty == theirs.repetition_penalty == 1.2
    assert found.sampling.max_length == theirs.max_length == 30
    assert (found.undone, theirs.num_beams) == (("num_beams",), 2)
    (folder / "generation_config.json").write_text("{}")
    assert read_defaults(folder).sampling == SamplingDefaults()


@pytest.mark.parametrize(
    "wish",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": "1"},
        {"no_repeat_ngram_size": -1},
        {"bad_words_ids": [5]},
        {"suppress_tokens": "x"},
        {"max_new_tokens": True},
        {"stop_strings": [5]},
        {"do_sample": "yes"},
        {"eos_token_id": [-1]},
    ],
)
def test_a_value_that_means_nothing_names_its_field(tmp_path: Path, wish: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wish))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(wish))} must"):
        read_defaults(tmp_path)


def test_what_may_be_left_out_may_be_none_and_numbers_may_be_numpys() -> None:
    names = [
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "stop",
        "seed",
        "min_p",
        "min_tokens",
        "logit_bias",
        "n",
    ]
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    numpy = SamplingParams(
        np.int64(5),
        temperature=np.float32(0.5),
        top_k=np.int32(3),
        seed=np.uint8(7),
        stop_token_ids=np.array([4, 5]),
        logit_bias={np.int64(3): np.float64(1)},
    )
    own = SamplingParams(5, 0.5, 3, seed=7, stop_token_ids=[4, 5], logit_bias={3: 1.0})
    assert numpy == own and hash(numpy) == hash(own)
    json.dumps([numpy.temperature, numpy.end_ids, numpy.biases])


def test_one_impossible_prompt_leaves_the_others(tmp_path: Path) -> None:
    folder, params = write_checkpoint(tmp_path / "m"), SamplingParams(4, temperature=0)
    rows: list[list[int]] = [[5, 6], [], [7] * 200, [8, 9], [500]]
    seen: dict[int, str | None] = {}
    with LLM(folder, dtype="float32") as llm:
        found = llm.generate(
            prompt_token_ids=rows,
            sampling_params=params,
            on_output=lambda index, result: seen.update({index: result.error}),
        )
        good = llm.generate(prompt_token_ids=[rows[0], rows[3]], sampling_params=params)
        with pytest.raises(PromptError, match=r"prompt 1 has 0 tokens.*2 more") as caught:
            llm.generate(prompt_token_ids=rows, sampling_params=params, on_error="raise")
        with pytest.raises(PromptError):
            llm.generate(prompt_token_ids=[[], []], sampling_params=params)
    assert caught.value.indices == (1, 2, 4)
    assert [found[n].token_ids for n in (0, 3)] == [r.token_ids for r in good]
    assert [found[n].finish_reason for n in (1, 2, 4)] == ["error"] * 3
    assert "200 tokens" in str(found[2].error) and "vocabulary" in str(found[4].error)
    assert seen == {n: r.error for n, r in enumerate(found)}


def test_token_ids_in_place_of_texts_say_where_they_belong(tmp_path: Path) -> None:
    from flexgen_jax import UserError

    with LLM(write_checkpoint(tmp_path / "m"), dtype="float32") as llm:
        with pytest.raises(UserError, match="prompt_token_ids"):
            llm.generate([[2, 5, 6]])  # type: ignore[list-item]
        params = SamplingParams(20, temperature=0, ignore_eos=True)
        (whole,) = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=params)
        token = whole.token_ids[3]
        ended = SamplingParams(20, temperature=0, ignore_eos=True, stop_token_ids=[token])
        (cut,) = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=ended)
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
        assert cut.finish_reason == "stop"
    with pytest.raises(UserError, match="closed"):
        llm.generate(prompt_token_ids=[[5]])
    with pytest.raises(UserError, match='policy must be "auto"'):
        LLM(policy="fast")  # type: ignore[arg-type]


def test_plain_parameters_follow_no_rule() -> None:
    everything = SamplingDefaults(
        temperature=0.7,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        bad_words_ids=((3,),),
        suppress_tokens=(3,),
        begin_suppress_tokens=(3,),
        forced_eos_token_id=(2,),
        min_tokens=3,
    )
    assert SamplingParams.plain(5).with_defaults(everything).is_plain
    assert not SamplingParams(5, temperature=0).with_defaults(everything).is_plain


@pytest.mark.parametrize("stop", ["ab", "xyz", "  ", "q"])
def test_a_stop_string_ends_a_text_at_its_first_place(tmp_path: Path, stop: str) -> None:
    """Whatever the text is before it: biases make it long, and of few characters."""
    letters = dict.fromkeys((ord(x) - 28 for x in "abxyz q"), 30.0)
    drawn = SamplingParams(60, temperature=1.0, seed=3, logit_bias=letters, ignore_eos=True)
    with LLM(write_checkpoint(tmp_path / "m"), dtype="float32") as llm:
        whole = llm.generate(prompt_token_ids=prompts(), sampling_params=drawn)
        ended = replace(drawn, stop=[stop, "never"])
        found = llm.generate(prompt_token_ids=prompts(), sampling_params=ended)
    for text, cut in zip(whole, found, strict=True):
        assert cut.text == text.text.partition(stop)[0]
        assert (cut.finish_reason == "stop") == (stop in text.text)
