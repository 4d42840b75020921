"""Texts that are JSON of a schema."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flexgen_jax import LLM, Policy, Request, SamplingParams
from flexgen_jax.errors import UserError
from flexgen_jax.requests.grammar import MAX_DIGITS, Digits, Grammars

pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON, LIST = SCHEMA, {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
PROMPTS = ["The man is called", "Once upon a time", "Anna is", "It was in the year"]


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and len(found["name"]) <= 9
        and type(found["age"]) is int
        and 0 <= found["age"] <= 150
        and len(found["tags"]) <= 2
        and set(found["tags"]) <= {"red", "green"}
    )


def is_list(text: str) -> bool:
    found = json.loads(text)
    return 2 <= len(found) <= 4 and all(type(x) is bool for x in found)


def is_json(text: str) -> bool:
    return json.loads(text) is not None


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "boolean"}
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


def params(schema: Any, temperature: float, seed: int = 0) -> SamplingParams:
    return SamplingParams(80, temperature=temperature, seed=seed, json_schema=schema)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    policy = Policy(batch_size=4, num_batches=2, kv_block_tokens=8)
    with LLM(dtype="float32", policy=policy) as found:
        yield found


@pytest.mark.few(1)
@pytest.mark.parametrize(("schema", "is_right"), [(PERSON, is_person), (LIST, is_list)])
def test_texts_are_of_the_schema(llm: LLM, schema: Any, is_right: Callable[[str], bool]) -> None:
    """Greedy or drawn, also where every token is about as likely as any other."""
    prompts = PROMPTS * 3
    asked = [params(schema, 2.0 * (n % 3), n) for n in range(len(prompts))]
    results = llm.generate(prompts, asked)
    assert all(result.finish_reason == "stop" and is_right(result.text) for result in results)
    assert len({result.text for result in results}) > 4


@pytest.mark.slow
def test_other_requests_beside_them_are_as_alone(llm: LLM) -> None:
    free = SamplingParams(20, temperature=1.0, seed=3, logprobs=2)
    mixed = [free, params(PERSON, 1.0), free, params(json.dumps(LIST), 0.0)]
    results = llm.generate(PROMPTS, mixed)
    alone = llm.generate(PROMPTS, free)
    for row in (0, 2):
        assert results[row].token_ids == alone[row].token_ids
    assert is_person(results[1].text) and is_list(results[3].text)


def test_a_text_goes_on_where_an_earlier_run_has_left_it(llm: LLM) -> None:
    asked = Request("a", PROMPTS[0], sampling_params=params(PERSON, 1.0), place=5)
    (whole,) = llm.stream([asked])
    for cut in (1, 9, len(whole.token_ids) - 1, len(whole.token_ids)):
        made = tuple(whole.token_ids[:cut])
        request = Request("a", PROMPTS[0], None, asked.sampling_params, None, made, 5)
        (found,) = llm.stream([request])
        assert (found.token_ids, found.finish_reason) == (whole.token_ids, "stop")


def test_a_text_that_breaks_the_rules_is_an_error(llm: LLM) -> None:
    made = tuple(llm.encode("no JSON"))
    request = Request("a", PROMPTS[0], sampling_params=params(PERSON, 0.0), continued=made)
    (found,) = llm.stream([request])
    assert found.finish_reason == "error"
    assert found.error is not None and "doesn't satisfy the grammar" in found.error


def test_what_cannot_be_followed_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="not supported: Invalid type: nonsense"):
        llm.generate(PROMPTS[:1], params({"type": "nonsense"}, 0.0))
    with pytest.raises(ValueError, match="json_schema is not JSON"):
        params("{", 0.0)
    with pytest.raises(ValueError, match="json_schema must be an object, not 3"):
        params("3", 0.0)
    with pytest.raises(ValueError, match="cannot be combined with min_tokens, ignore_eos or stop"):
        SamplingParams(json_schema=LIST, ignore_eos=True)
    for schema in ({"type": "integer", "minimum": 10**400}, {"enum": ["\ud800"]}, deep(400)):
        bad = Request("a", PROMPTS[0], sampling_params=params(schema, 0.0))
        good = Request("b", PROMPTS[0], sampling_params=params(LIST, 0.0))
        first, second = llm.stream([bad, good])
        assert first.error is not None or is_json(first.text)
        assert is_list(second.text)
    with pytest.raises(ValueError, match="json_schema is not JSON"):
        params({"type": "integer", "minimum": math.inf}, 0.0)
    ends = Grammars(llm._model.tokenizer, llm.config.vocab_size, ())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs an end token"):
        ends.check(json.dumps(LIST))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    asked = [Request("a", PROMPTS[0], None, params({"type": "null"}, 0.0))]
    refused, other = llm.stream([*asked, Request("b", PROMPTS[0], None, SamplingParams(2))])
    assert "pip install llguidance" in str(refused.error) and other.error is None
    with pytest.raises(UserError, match=r"pip install llguidance"):
        llm.generate(PROMPTS[:1], params({"type": "number"}, 0.0))


def test_a_number_has_an_end(llm: LLM) -> None:
    """Whatever its digits are likely to be: only digits are, here."""
    digits = {n: 100.0 for n in range(llm.config.vocab_size) if llm.piece(n).strip().isdigit()}
    for schema in ({"type": "integer"}, {"type": "number"}, {"type": "array"}):
        asked = SamplingParams(200, temperature=0, json_schema=schema, logit_bias=digits)
        (result,) = llm.generate(PROMPTS[:1], asked)
        assert result.finish_reason == "stop" or schema == {"type": "array"}
        runs = re.findall(r"[0-9]+", result.text)
        assert MAX_DIGITS <= max(map(len, runs)) <= MAX_DIGITS + 8


def test_digits_in_a_string_have_none() -> None:
    digits = Digits()
    digits.take(b'{"a\\"1": "' + b"7" * 40)
    assert digits.count == 0
    digits.take(b'", "b": -12.34')
    assert digits.count == 2


def test_a_schema_begins_after_the_reasoning(llm: LLM) -> None:
    """Where the prompt ends with the mark that opens it; the text may go on for a while."""
    close = llm.encode("</think>", is_whole=True)
    made = (*llm.encode("well", is_whole=True), *close)
    for continued in ((), made):
        request = Request(
            "a", "It is <think>\n", None, params(PERSON, 1.0), continued=continued, place=3
        )
        (result,) = llm.stream([request])
        if continued:
            assert result.finish_reason == "stop"
            assert is_person(result.text.partition("</think>")[2])
        else:
            assert len(result.token_ids) == 80 and result.finish_reason == "length"
            assert not {*llm.config.eos_ids} & {*result.token_ids}
