"""Tool calls in the forms that models write.

A form is recognized by its opening mark, so that a model's template need not be known:

    <tool_call>{"name": F, "arguments": {...}}</tool_call>           Hermes, Qwen, Granite, SmolLM
    <tool_call><function=F><parameter=K>V</parameter></function>...  Qwen3-Coder, Qwen3.5, Seed-OSS
    <tool_call>F<arg_key>K</arg_key><arg_value>V</arg_value>...      GLM-4.5 and later, Hunyuan 3
    <minimax:tool_call><invoke name="F"><parameter name="K">V...     MiniMax-M2; DeepSeek V3.2
    <|python_tag|>{"name": F, "parameters": {...}}                   Llama 3, also without the mark
    [TOOL_CALLS][{"name": F, ...}] or [TOOL_CALLS]F[ARGS]{...}       Mistral
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>F<｜tool▁sep｜>{...}...  DeepSeek V3 and V3.1
    <|tool_calls_section_begin|><|tool_call_begin|>functions.F:0...  Kimi K2
    <|tool_call>call:F{K:<|"|>V<|"|>}<tool_call|>                    Gemma 4
    [F(K="V")], also after <|tool_call_start|>                       Llama 4, LFM2
    functools[{"name": F, ...}], <|tool_call|>[{...}]                Phi-4-mini, Granite 3

Harmony, the form of gpt-oss, is read by `models.answer_stream`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from flexgen_jax.models.text_reader import Reading, TextReader

SPECIAL_MARKS = (
    *("<tool_call>", "</tool_call>", "<tool_calls>", "</tool_calls>", "<tool_sep>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "｜DSML｜"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call|>", "<|tool_call_start|>"),
)
"""Marks that may be special tokens of a vocabulary."""


class ToolCall(NamedTuple):
    """A call. arguments: JSON text, which a limit of tokens may have cut off; id: the model's own,
    "" where its form has none."""

    name: str
    arguments: str
    id: str = ""


class Tools(NamedTuple):
    """The tools that an answer may call. schemas: the JSON schema of each tool's parameters, by
    name; max_calls: further calls are left out."""

    schemas: Mapping[str, Mapping[str, Any]]
    max_calls: int | None = None

    def forcing(self) -> dict[str, Any]:
        """Returns the JSON schema of a call of one of the tools: {"name": F, "parameters": {...}},
        a form that `CallReader.bare` reads."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "parameters": {"type": "object", **schema},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for name, schema in self.schemas.items()
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}


def tools_of(described: Sequence[Mapping[str, Any]], max_calls: int | None = None) -> Tools:
    """Returns the tools of a request, which has them as {"type": "function", "function": {...}} or
    as the function itself."""
    tools: dict[str, Mapping[str, Any]] = {}
    for entry in described:
        function = entry.get("function", entry)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            tools[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return Tools(tools, max_calls)


def typed(text: str, schema: Any) -> Any:
    """Returns the value of a parameter that is written as raw text, by its JSON schema."""
    types = _types(schema)
    if "string" in types and not ("null" in types and text.strip() == "null"):
        return text
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
            return value
    return {"true": True, "false": False}.get(text.strip().lower(), text)


def _types(schema: Any) -> set[str]:
    """Returns the JSON types that a schema names."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    types = {name for name in names if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            types |= _types(option)
    if not types and isinstance(schema.get("enum"), list):
        types = {"string"} if all(isinstance(x, str) for x in schema["enum"]) else set()
    return types


class Tag(NamedTuple):
    """A pair of tags. begin: the first characters of the opening tag; rest: the pattern of its
    others, whose first group is a name; end: the closing tag."""

    begin: str
    rest: str
    end: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """The opening tag."""
        return re.compile(self.begin + self.rest)


class Tags(NamedTuple):
    """A form whose parameters have tags of their own."""

    function: Tag
    parameter: Tag


QWEN = Tags(
    Tag("<function=", r"([^>\n]+)>", "</function>"),
    Tag("<parameter=", r"([^>\n]+)>", "</parameter>"),
)
INVOKE = Tags(
    Tag("<invoke name=", r'"?([^">\n]+)"?>', "</invoke>"),
    Tag("<parameter name=", r'"?([^">\n]+)"?>', "</parameter>"),
)
DSML = Tags(
    Tag('<｜DSML｜invoke name="', r'([^"\n]+)">', "</｜DSML｜invoke>"),
    Tag(
        '<｜DSML｜parameter name="',
        r'([^"\n]+)" string="(true|false)">',
        "</｜DSML｜parameter>",
    ),
)

HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{])')
"""The beginning of a call in JSON whose arguments can be passed on as they come."""

PYTHON_CALL = re.compile(r"\[\s*([A-Za-z_][\w.]*)\(")
KIMI_HEADER = re.compile(r"(?:functions\.)?([\w.\-]+?)(?::\d+)?\s*$")
GEMMA_CALL = re.compile(r"call:([\w.\-]+)(\{.*\})\s*$", re.DOTALL)
GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w\-]*)\s*:")
FENCE = "```"


class CallReader:
    """Reads the calls of an answer.

    text: where they are read; tools: of the request. A call of an unknown tool is text. The pieces
    of calls go to `text.call` and `text.arguments`.
    """

    def __init__(self, text: TextReader, tools: Tools) -> None:
        self._text, self._tools = text, tools.schemas
        self.openers: dict[str, Callable[[], Reading[bool]]] = {
            "<tool_call>": lambda: self._tagged("</tool_call>"),
            "<seed:tool_call>": lambda: self._tagged("</seed:tool_call>"),
            "<tool_calls>": lambda: self._nested("<tool_call>", "</tool_call>", "</tool_calls>"),
            "<function=": lambda: self._functions(QWEN, "</tool_call>", is_open=True),
            "<minimax:tool_call>": lambda: self._functions(INVOKE, "</minimax:tool_call>"),
            "<function_calls>": lambda: self._functions(INVOKE, "</function_calls>"),
            "<｜DSML｜function_calls>": lambda: self._functions(DSML, "</｜DSML｜function_calls>"),
            "<｜DSML｜tool_calls>": lambda: self._functions(DSML, "</｜DSML｜tool_calls>"),
            "<|python_tag|>": self._json_calls,
            "[TOOL_CALLS]": self._mistral,
            "<｜tool▁calls▁begin｜>": self._deepseek,
            "<|tool_calls_section_begin|>": self._kimi,
            "<|tool_call>": self._gemma,
            "<|tool_call_start|>": lambda: self._python("<|tool_call_end|>"),
            "<|tool_call|>": self._json_calls,
            "functools": self._json_calls,
        }

    def bare(self) -> Reading[bool]:
        """Reads calls without a mark, which only an answer's beginning may have; returns whether
        there was one."""
        text = self._text
        yield from text.wait(lambda: bool(text.buffer.lstrip()))
        first = text.buffer.lstrip()[:1]
        if first == "{":
            return (yield from self._json_calls())
        if first == "[":
            yield from text.wait(lambda: len(text.buffer) > 200 or "(" in text.buffer)
            call = PYTHON_CALL.match(text.buffer.lstrip())
            if call is not None and call[1] in self._tools:
                return (yield from self._python(None))
        return False

    # JSON

    def _json_calls(self) -> Reading[bool]:
        """Reads objects with a name and arguments: one, several in a row, or a list of them."""
        text, has_call = self._text, False
        while True:
            yield from text.skip(" \n\r\t;,[]" if has_call else " \n\r\t[")
            if not text.buffer.startswith("{"):
                return has_call
            if not (yield from self._json_call()):
                return has_call
            has_call = True

    def _json_call(self, end: str | None = None) -> Reading[bool]:
        """Reads an object; returns False, and reads nothing, unless it is a call. end: a mark that
        ends an object whose last bracket is missing."""
        text, scanner, num_scanned = self._text, BracketScanner(), 0
        while True:
            head = HEAD.match(text.buffer)
            if head and head[1] not in self._tools:
                return False
            if head:
                text.take(head.end())
                yield from self._call_with_object(head[1])
                yield from self._rest_of_object(end)
                return True
            num_bytes = scanner.end(text.buffer[num_scanned:])
            if num_bytes is not None:
                return self._whole_object(num_scanned + num_bytes)
            num_scanned = len(text.buffer)
            if text.is_last:
                return False
            yield

    def _whole_object(self, size: int) -> bool:
        """Takes a call whose entries are in another order, or whose arguments are no object."""
        found = _object(self._text.buffer[:size])
        name = found.get("name") if found is not None else None
        if found is None or not isinstance(name, str) or name not in self._tools:
            return False
        self._text.take(size)
        arguments = found.get("arguments", found.get("parameters"))
        if isinstance(arguments, str) and _object(arguments) is not None:
            self._whole(name, arguments)
        else:
            self._whole(name, json.dumps(arguments or {}, ensure_ascii=False))
        return True

    def _call_with_object(self, name: str, call_id: str = "") -> Reading[None]:
        """Reads a call's arguments, a JSON object, which is passed on as it comes; without one,
        they are empty."""
        text = self._text
        text.call(name, call_id)
        yield from text.skip(" \n\r\t")
        if text.buffer.startswith("{"):
            yield from self._take_through(BracketScanner(), text.arguments)
        else:
            text.arguments("" if text.is_last else "{}")

    def _take_through(
        self, scanner: BracketScanner, use: Callable[[str], None] | None = None
    ) -> Reading[None]:
        """Takes the text up to the end that a scanner finds. use: gets each piece of it."""
        text = self._text
        while True:
            size = scanner.end(text.buffer)
            piece = text.take(len(text.buffer) if size is None else size)
            if use is not None:
                use(piece)
            if size is not None or text.is_last:
                return
            yield

    def _rest_of_object(self, end: str | None) -> Reading[None]:
        """Skips what follows a call's arguments in its object, up to the mark `end` at most."""
        text = self._text
        yield from text.skip(" \n\r\t")
        if end is not None:
            yield from text.wait(lambda: text.starts(end) or not text.may_begin(end))
            if text.starts(end):  # the model forgot the bracket
                return
        yield from self._take_through(BracketScanner(depth=1))

    # Tags

    def _tagged(self, end: str) -> Reading[bool]:
        """Reads a call between tags: JSON, tags with parameters, or a name with keys."""
        text, begin = self._text, QWEN.function.begin
        yield from text.skip(" \n\r\t")
        if text.buffer.startswith("{"):
            is_call = yield from self._json_call(end)
            if is_call:
                yield from text.skip_past(end)
            return is_call
        yield from text.wait(lambda: text.starts(begin) or not text.may_begin(begin))
        if text.starts(begin):
            return (yield from self._functions(QWEN, end))
        return (yield from self._keys(end))

    def _functions(self, tags: Tags, end: str, is_open: bool = False) -> Reading[bool]:
        """Reads functions whose parameters have tags, up to the mark `end`. is_open: whether the
        mark was the beginning of the first function."""
        text, has_call, function = self._text, False, tags.function.pattern
        if is_open:
            text.put_back(tags.function.begin)
        while True:
            yield from text.skip(" \n\r\t")
            yield from text.wait(
                lambda: (
                    text.match(function) is not None
                    or "\n" in text.buffer
                    or text.starts(end)
                    or not text.may_begin(tags.function.begin, end)
                )
            )
            head = text.match(function)
            name = head[1].strip() if head else ""
            if head is None or name not in self._tools:
                if has_call and text.starts(end):
                    text.take_mark(end)
                return has_call
            text.take(head.end())
            has_call = True
            text.call(name)
            yield from self._parameters(tags, self._tools[name], end)

    def _parameters(self, tags: Tags, schema: Mapping[str, Any], end: str) -> Reading[None]:
        """Reads the parameters of a function up to its end."""
        text, separator = self._text, "{"
        function_end, parameter = tags.function.end, tags.parameter
        while True:
            before, mark = yield from text.until(function_end, end, ">")
            head = text.find_last(parameter.pattern, before + ">") if mark == ">" else None
            if mark == ">" and head is None:
                continue
            if head is None:
                break
            value, mark = yield from text.until(parameter.end, function_end, f"\n{parameter.begin}")
            if mark is None:
                break
            if mark not in (parameter.end, function_end):  # without an end of its own
                text.put_back(mark)
            name = head[1].strip()
            if len(head.groups()) > 1:
                is_text = head[2] == "true"
                plain: Any = value if is_text else typed(value, {})
            else:
                value = value.removeprefix("\n").removesuffix("\n")
                plain = typed(value, _properties(schema).get(name))
            text.arguments(f"{separator}{json.dumps(name)}: {_dumped(plain)}")
            separator = ", "
            if mark == function_end:
                break
        if mark is not None:
            text.arguments("{}" if separator == "{" else "}")

    def _keys(self, end: str) -> Reading[bool]:
        """Reads F<arg_key>K</arg_key><arg_value>V</arg_value>..."""
        text = self._text
        yield from text.wait(lambda: text.has_any("\n", "<arg_key>", "<tool_sep>", end))
        name, mark, _ = text.peek("<arg_key>", "<tool_sep>", end)
        name = name.strip() if mark else text.buffer.strip().partition("\n")[0].strip()
        if name not in self._tools:
            return False
        _, mark = yield from text.until("<arg_key>", end)
        properties = _properties(self._tools[name])
        text.call(name)
        separator = "{"
        while mark == "<arg_key>":
            key, _ = yield from text.until("</arg_key>")
            _, mark = yield from text.until("<arg_value>", end)
            if mark != "<arg_value>":
                break
            value, mark = yield from text.until("</arg_value>", "<arg_key>", end)
            if mark is None:
                return True
            plain = typed(value, properties.get(key.strip()))
            text.arguments(f"{separator}{json.dumps(key.strip())}: {_dumped(plain)}")
            separator = ", "
            if mark == "</arg_value>":
                _, mark = yield from text.until("<arg_key>", end)
        if mark is not None:
            text.arguments("{}" if separator == "{" else "}")
        return True

    def _nested(self, begin: str, end: str, last: str) -> Reading[bool]:
        """Reads calls between tags, in an outer pair of tags."""
        text, has_call = self._text, False
        while True:
            yield from text.skip(" \n\r\t")
            yield from text.wait(
                lambda: text.starts(begin, last) or not text.may_begin(begin, last)
            )
            if text.starts(last):
                text.take_mark(last)
                return has_call
            if not text.starts(begin):
                return has_call
            text.take_mark(begin)
            if not (yield from self._tagged(end)):
                return has_call
            has_call = True

    # Forms of single families

    def _mistral(self) -> Reading[bool]:
        """Reads a list of objects, or F[ARGS]{...}."""
        text = self._text
        yield from text.wait(lambda: bool(text.buffer.strip()))
        if text.buffer.lstrip()[:1] in "[{":
            return (yield from self._json_calls())
        name, mark, size = "", None, 0

        def has_name() -> bool:
            nonlocal name, mark, size
            name, mark, size = text.peek("[ARGS]", "[CALL_ID]", "{")
            return mark is not None

        yield from text.wait(has_name)
        name = name.strip()
        if mark is None or name not in self._tools:
            return False
        call_id = ""
        text.take(size if mark != "{" else size - 1)
        if mark == "[CALL_ID]":
            call_id, _ = yield from text.until("[ARGS]")
        yield from self._call_with_object(name, call_id.strip())
        return True

    def _deepseek(self) -> Reading[bool]:
        """Reads function<｜tool▁sep｜>F + fenced JSON of V3, and F<｜tool▁sep｜>{...} of V3.1."""
        text, has_call = self._text, False
        while True:
            _, mark = yield from text.until("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")
            if mark != "<｜tool▁call▁begin｜>":
                return has_call
            head, mark = yield from text.until("<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
            name = head.strip()
            if name == "function":
                name, _ = yield from text.until(FENCE)
                name = name.strip()
                yield from text.wait(lambda: text.has_any("{", "<｜tool▁call▁end｜>"))
                text.take(len(text.buffer.partition("{")[0]))
            if name not in self._tools or mark is None:
                return has_call
            has_call = True
            yield from self._call_with_object(name)

    def _kimi(self) -> Reading[bool]:
        """Reads functions.F:0<|tool_call_argument_begin|>{...}; the header is the call's id."""
        text, has_call = self._text, False
        while True:
            _, mark = yield from text.until("<|tool_call_begin|>", "<|tool_calls_section_end|>")
            if mark != "<|tool_call_begin|>":
                return has_call
            header, mark = yield from text.until(
                "<|tool_call_argument_begin|>", "<|tool_call_end|>"
            )
            match = KIMI_HEADER.match(header.strip())
            if mark is None or match is None or match[1] not in self._tools:
                return has_call
            has_call = True
            yield from self._call_with_object(match[1], header.strip())

    def _gemma(self) -> Reading[bool]:
        """Reads call:F{K:<|"|>V<|"|>,...}."""
        text, end, quote = self._text, "<tool_call|>", '<|"|>'
        yield from text.wait(lambda: text.has_any(end))
        body, mark, size = text.peek(end)
        call = GEMMA_CALL.match(body.strip())
        if mark is None or call is None or call[1] not in self._tools:
            return False
        pieces = call[2].split(text.key(quote))
        for number, piece in enumerate(pieces):
            is_text = number % 2 == 1
            pieces[number] = _dumped(piece) if is_text else GEMMA_KEY.sub(r'\1"\2":', piece)
        arguments = _object("".join(pieces))
        if arguments is None:
            return False
        text.take(size)
        self._whole(call[1], _dumped(arguments))
        return True

    def _python(self, end: str | None) -> Reading[bool]:
        """Reads [F(K="V"), ...]. end: the mark after the list; None: the list ends itself."""
        text = self._text
        if end is not None:
            yield from text.wait(lambda: text.has_any(end))
            source, _, size = text.peek(end)
        else:
            scanner = BracketScanner("([{", ")]}", quotes="\"'")
            num_scanned, place = 0, None
            while place is None and not text.is_last:
                place = scanner.end(text.buffer[num_scanned:])
                if place is None:
                    num_scanned = len(text.buffer)
                    yield
            size = len(text.buffer) if place is None else num_scanned + place
            source = text.buffer[:size]
        calls = _python_calls(source)
        if calls is None or not all(call.name in self._tools for call in calls):
            return False
        text.take(size)
        for call in calls:
            self._whole(call.name, call.arguments)
        return True

    def _whole(self, name: str, arguments: str) -> None:
        self._text.call(name)
        self._text.arguments(arguments)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _python_calls(source: str) -> list[ToolCall] | None:
    """Returns the calls of a Python list of calls; None for anything else."""
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        elements = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = []
        for call in elements:
            if not isinstance(call, ast.Call) or call.args:
                return None
            arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
            calls.append(ToolCall(ast.unparse(call.func), _dumped(arguments)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


def _object(text: str) -> dict[str, Any] | None:
    """Returns the JSON object of a text; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class BracketScanner:
    """Finds the end of a value in brackets, in a text that comes in pieces.

    opening, closing: the brackets, those of JSON unless others are given; quotes: the marks around
    strings; depth: open brackets before the text.
    """

    def __init__(
        self, opening: str = "{[", closing: str = "}]", *, quotes: str = '"', depth: int = 0
    ) -> None:
        self._opening, self._closing, self._quotes = opening, closing, quotes
        self._depth, self._quote, self._is_escaped = depth, "", False

    def end(self, piece: str) -> int | None:
        """Returns the number of characters of this piece up to the end; None before it."""
        for index, char in enumerate(piece):
            if self._quote:
                if not self._is_escaped and char == self._quote:
                    self._quote = ""
                self._is_escaped = not self._is_escaped and char == "\\"
            elif char in self._quotes:
                self._quote = char
            elif char in self._opening:
                self._depth += 1
            elif char in self._closing:
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None
