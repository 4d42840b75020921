"""Tool calls in every form, whole and in whatever pieces they come."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_jax.models.answer_stream import AnswerStream
from flexgen_jax.models.loading import shipped_model
from flexgen_jax.models.marks import HARMONY
from flexgen_jax.models.reasoning import joined_calls
from flexgen_jax.models.text_reader import Piece
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.models.tool_calls import SPECIAL_MARKS, tools_of, typed
from tests.helpers.cases import examples
from tests.helpers.models import tokenizer_with

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "near": {"type": "array"},
    "at": {"type": ["object", "null"]},
}
TOOLS = tools_of(
    [
        {"type": "function", "function": {"name": name, "parameters": {"properties": PROPERTIES}}}
        for name in ("weather", "set.time-1")
    ]
)
Call = tuple[str, dict[str, Any]]


def raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemma(x)}" for key, x in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def in_json(calls: list[Call], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: values}) for name, values in calls]


def tags(calls: list[Call], function: str, parameter: str, ends: tuple[str, str]) -> str:
    def call(name: str, values: dict[str, Any]) -> str:
        parameters = (
            parameter.format(key, json.dumps(isinstance(value, str))) + raw(value) + ends[0]
            for key, value in values.items()
        )
        return function.format(name) + "".join(parameters) + ends[1]

    return "\n".join(call(*each) for each in calls)


def qwen(calls: list[Call]) -> str:
    ends = ("\n</parameter>\n", "</function>")
    return tags(calls, "<function={}>\n", "<parameter={}>\n", ends)


def invoke(calls: list[Call]) -> str:
    ends = ("</parameter>\n", "</invoke>")
    return tags(calls, '<invoke name="{}">\n', '<parameter name="{}">', ends)


def dsml(calls: list[Call]) -> str:
    ends = ("</｜DSML｜parameter>\n", "</｜DSML｜invoke>")
    parameter = '<｜DSML｜parameter name="{}" string="{}">'
    return tags(calls, '<｜DSML｜invoke name="{}">\n', parameter, ends)


def keys(calls: list[Call], separator: str = "\n") -> str:
    def call(name: str, values: dict[str, Any]) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>\n"
            for key, value in values.items()
        )
        return f"<tool_call>{name}{separator}{''.join(pairs)}</tool_call>"

    return "\n".join(call(*each) for each in calls)


def python(calls: list[Call]) -> str:
    def call(name: str, values: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})"

    return "[" + ", ".join(call(*each) for each in calls) + "]"


def deepseek(calls: list[Call], before: str, after: str) -> str:
    made = (
        "<｜tool▁call▁begin｜>"
        + before.format(name)
        + json.dumps(values)
        + after
        + "<｜tool▁call▁end｜>"
        for name, values in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(made)}<｜tool▁calls▁end｜>"


def kimi(calls: list[Call]) -> str:
    made = (
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{json.dumps(values)}<|tool_call_end|>"
        for number, (name, values) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"


def harmony(calls: list[Call]) -> str:
    made = (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(values)}<|call|>"
        for name, values in calls
    )
    return f"<|channel|>analysis<|message|>I call.<|end|>{''.join(made)}"


FORMS: dict[str, Any] = {
    "hermes": lambda c: "\n".join(f"<tool_call>\n{x}\n</tool_call>" for x in in_json(c)),
    "qwen3-coder": lambda c: "\n".join(f"<tool_call>\n{qwen([x])}\n</tool_call>" for x in c),
    "without the outer tag": qwen,
    "seed-oss": lambda c: f"<seed:tool_call>\n{qwen(c)}\n</seed:tool_call>",
    "minimax": lambda c: f"<minimax:tool_call>\n{invoke(c)}\n</minimax:tool_call>",
    "dsml": lambda c: f"<｜DSML｜function_calls>\n{dsml(c)}\n</｜DSML｜function_calls>",
    "llama 3.1": lambda c: "<|python_tag|>" + "; ".join(in_json(c, "parameters")),
    "bare": lambda c: "\n".join(in_json(c, "parameters")),
    "mistral": lambda c: "[TOOL_CALLS][" + ", ".join(in_json(c)) + "]",
    "mistral v11": lambda c: "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(v)}" for n, v in c),
    "deepseek v3": lambda c: deepseek(c, "function<｜tool▁sep｜>{}\n```json\n", "\n```"),
    "deepseek v3.1": lambda c: deepseek(c, "{}<｜tool▁sep｜>", ""),
    "kimi": kimi,
    "glm": keys,
    "glm on one line": lambda c: keys(c, ""),
    "hunyuan 3": lambda c: f"<tool_calls>\n{keys(c, '<tool_sep>')}\n</tool_calls>",
    "gemma 4": lambda c: "".join(f"<|tool_call>call:{n}{gemma(v)}<tool_call|>" for n, v in c),
    "lfm2": lambda c: f"<|tool_call_start|>{python(c)}<|tool_call_end|>",
    "llama 4": python,
    "phi-4-mini": lambda c: "functools[" + ", ".join(in_json(c)) + "]",
    "granite 3": lambda c: "<|tool_call|>[" + ", ".join(in_json(c)) + "]",
    "harmony": harmony,
}

TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Cn"], exclude_characters='<>|"\\'), max_size=12
)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT.map(str.strip),
        "days": st.integers(-9, 9999),
        "near": st.lists(TEXT, max_size=2),
        "at": st.dictionaries(st.sampled_from(["x", "y"]), st.integers(0, 9)),
    },
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["weather", "set.time-1"]), VALUES), min_size=1, max_size=3
)
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One of bytes, with all marks as special tokens."""
    marks = (*HARMONY, "<|constrain|>", *SPECIAL_MARKS, "<think>", "</think>")
    return tokenizer_with(tmp_path_factory.mktemp("marks"), marks)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """One without marks."""
    return Tokenizer(shipped_model(), None)


def read(
    tokenizer: Tokenizer, text: str, sizes: list[int], prompt: str = "", share: float = 1.0
) -> list[Piece]:
    """The pieces of a text's first share, which comes in pieces of these sizes, again and again."""
    stream = AnswerStream(tokenizer, tokenizer.encode(prompt, is_whole=True), tools=TOOLS)
    text, made, number = stream._text.key(text), list[Piece](), 0
    text = text[: int(share * len(text))]
    while text:
        size = sizes[number % len(sizes)]
        made += stream.add_text(text[:size])
        text, number = text[size:], number + 1
    return made + stream.end()


def texts(pieces: list[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


@pytest.mark.parametrize("form", FORMS)
@examples(25)
@given(calls=CALLS, sizes=SIZES, is_special=st.booleans(), after=st.sampled_from(["", "\nDone."]))
def test_calls_are_read_in_any_pieces(
    special: Tokenizer,
    plain: Tokenizer,
    form: str,
    calls: list[Call],
    sizes: list[int],
    is_special: bool,
    after: str,
) -> None:
    if form in ("lfm2", "llama 4"):  # whose names are Python's
        calls = [("weather", values) for _, values in calls]
    if form == "harmony":
        is_special, after = True, ""
    before = "" if form in ("bare", "llama 4", "harmony") else "I call it.\n\n"
    tokenizer, written = special if is_special else plain, before + FORMS[form](calls) + after
    pieces = read(tokenizer, written, sizes)
    assert [(call.name, json.loads(call.arguments)) for call in joined_calls(pieces)] == calls
    assert texts(pieces, "content") == before.rstrip() + after.lstrip()
    assert joined_calls(read(tokenizer, written, [10**6])) == joined_calls(pieces)


@pytest.mark.parametrize("form", FORMS)
@examples(10)
@given(share=st.floats(0, 1), sizes=SIZES)
def test_a_call_that_is_cut_off(
    special: Tokenizer, form: str, share: float, sizes: list[int]
) -> None:
    """Its arguments are a beginning of the whole ones."""
    written = FORMS[form]([("weather", {"city": "Oslo", "days": 3})])
    pieces = read(special, written, sizes, share=share)
    assert joined_calls(pieces) == joined_calls(read(special, written, [10**6], share=share))
    for call in joined_calls(pieces):
        assert call.name == "weather"
        assert '{"city": "Oslo", "days": 3}'.startswith(call.arguments)


@pytest.mark.parametrize(
    "prose",
    [
        "Write <tool_call> before it, and </tool_call> after it.",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        "<tool_call>unknown\n<arg_key>a</arg_key></tool_call>",
        "<function=unknown>\n</function>",
        '{"name": "unknown", "parameters": {}}',
        '{"name": "weather"',
        '{"city": "Oslo"}',
        "[weather] is a link, [1, 2] a list",
        "functools is a module",
        "[TOOL_CALLS]",
        "a < b <",
    ],
)
@pytest.mark.parametrize("sizes", [[1], [7, 2], [999]])
def test_prose_is_text(plain: Tokenizer, prose: str, sizes: list[int]) -> None:
    pieces = read(plain, prose, sizes)
    assert not joined_calls(pieces)
    assert texts(pieces, "content") == prose


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "<function=weather>\n<parameter=city>\na\n<parameter=days>\n2\n</function>",
            {"city": "a", "days": 2},
        ),
        ("<function=weather>\n<parameter=city>\na</function>", {"city": "a"}),
        (
            "weather\n<arg_key>city</arg_key><arg_value>a<arg_key>days</arg_key>"
            "<arg_value>2</arg_value>",
            {"city": "a", "days": 2},
        ),
    ],
)
@pytest.mark.parametrize("sizes", [[1], [999]])
def test_missing_ends_lose_nothing(
    plain: Tokenizer, written: str, expected: dict[str, Any], sizes: list[int]
) -> None:
    second = FORMS["hermes"]([("weather", {"days": 1})])
    pieces = read(plain, f"<tool_call>{written}</tool_call>\n{second} bye", sizes)
    found = [json.loads(call.arguments) for call in joined_calls(pieces)]
    assert found == [expected, {"days": 1}]
    assert texts(pieces, "content") == "bye"


def test_odd_schemas_and_numbers() -> None:
    for schema in ({"type": None}, {"anyOf": 5}, {"type": 3}, []):
        assert typed("a", schema) == "a"
    assert typed("NaN", {"type": "number"}) == "NaN"
    assert typed("1e999", {"type": "number"}) == "1e999"


@pytest.mark.parametrize("header", ["final<|constrain|>json", "final <|constrain|>json"])
def test_a_constrained_answer_is_content(special: Tokenizer, header: str) -> None:
    pieces = read(special, f'<|channel|>{header}<|message|>{{"a":1}}<|return|>', [3])
    assert texts(pieces, "content") == '{"a":1}'
    call = "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{}<|call|>"
    assert [call.name for call in joined_calls(read(special, call, [3]))] == ["weather"]


def test_further_calls_are_left_out(plain: Tokenizer) -> None:
    tools = TOOLS._replace(max_calls=1)
    text = FORMS["hermes"]([("weather", {"days": 1}), ("weather", {"days": 2})])
    stream = AnswerStream(plain, tools=tools)
    (call,) = joined_calls(stream.add_text(text) + stream.end())
    assert json.loads(call.arguments) == {"days": 1}


def test_a_call_in_reasoning_ends_it_where_marks_are_tokens(
    special: Tokenizer, plain: Tokenizer
) -> None:
    call = FORMS["hermes"]([("weather", {"city": "Oslo"})])
    for tokenizer, num_calls in ((special, 1), (plain, 0)):
        pieces = read(tokenizer, f"So. {call}", [1], "ask<think>")
        assert len(joined_calls(pieces)) == num_calls
    pieces = read(plain, f"So.</think>\n\n{call}", [1], "ask<think>")
    assert (texts(pieces, "reasoning"), len(joined_calls(pieces))) == ("So.", 1)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"arguments": {"city": "Oslo"}, "name": "weather"}', '{"city": "Oslo"}'),
        ('{"name": "weather", "arguments": "{\\"city\\": 1}"}', '{"city": 1}'),
        ('{"name": "weather", "arguments": null}', "{}"),
        ('{"name": "weather"}', "{}"),
        ('{"name": "weather", "arguments": {"city": "a"}', '{"city": "a"}'),
        ('{"id": "a", "name": "weather", "arguments": {"city": "}"}, "x": {}}', '{"city": "}"}'),
    ],
)
@pytest.mark.parametrize("sizes", [[1], [999]])
def test_other_objects(plain: Tokenizer, written: str, expected: str, sizes: list[int]) -> None:
    (call,) = joined_calls(read(plain, f"<tool_call>{written}</tool_call>", sizes))
    assert (call.name, call.arguments) == ("weather", expected)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3", {"type": "string"}, "3"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "null"),
        ("True", {"type": "boolean"}, True),
        ("TRUE", {"type": "boolean"}, True),
        ("['a']", {"type": "array"}, ["a"]),
        ("{broken", {"type": "object"}, "{broken"),
        ("12", None, 12),
        ("12", {"enum": ["12", "13"]}, "12"),
    ],
)
def test_parameters_have_the_type_of_their_schema(text: str, schema: Any, value: Any) -> None:
    assert typed(text, schema) == value
