"""Limits of chat templates, which are programs from untrusted model folders.

Jinja's sandbox prevents dangerous calls, but neither endless loops nor huge results. This
environment counts loop steps and calls, and checks the size of a result before computing it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 5.0
"""Seconds that a template may take for a conversation."""

MAX_LENGTH = 32 << 20
"""Characters of a text, or elements of a list, that a template may make."""

MADE_SHARE = 16
"""Limit of all texts and lists of one rendering together, in multiples of `MAX_LENGTH`."""

MAX_WIDTH = 10_000
"""The largest number that a filter or a method of a text is given, such as a width."""

MAX_BITS = 10_000
"""Bits of a whole number."""

STEPS_PER_CLOCK_CHECK = 256
"""Steps between two looks at the time."""


class LimitError(TemplateError):
    """A template goes past a limit."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with limits of time and of the size of results. Threads may share it."""

    intercepted_binops = frozenset(["*", "+", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = threading.local()
        del self.globals["lipsum"], self.filters["urlize"]  # slow, and of no use for prompts
        self.filters = {name: self.limited(name, f) for name, f in self.filters.items()}
        self.filters["_counted"] = self._counted

    def limited_template(self, source: str) -> Any:
        """Returns a template whose loops and joined texts are counted."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        return self.template_class.from_code(self, self.compile(_added(tree)), self.globals)

    def rendered(self, template: Any, variables: Mapping[str, Any]) -> str:
        """Returns a template's text; raises `LimitError` if it goes past a limit."""
        self._local.steps, self._local.made = 0, 0
        self._local.end = time.monotonic() + MAX_SECONDS
        pieces, length = [], 0
        for piece in template.generate(**variables):
            length += len(piece)
            self._check(length)
            pieces.append(piece)
        return "".join(pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check(len(left) + len(right))
        elif operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int):
                    self._check(len(sequence) * max(count, 0))
            self._check_bits(left, right, lambda a, b: a.bit_length() + b.bit_length())
        elif operator == "**":
            self._check_bits(left, right, lambda a, b: a.bit_length() * b)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        result = super().call_binop(context, operator, left, right)
        self._made(len(result) if hasattr(result, "__len__") else 0)
        return result

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a macro or a block writes."""
        piece_list = list(pieces)
        self._check(sum(map(len, piece_list)))
        self._made(sum(map(len, piece_list)))
        return "".join(piece_list)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns what a template gets for `str.format`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            values = list(args[0].values()) if value.__name__ == "format_map" else [*args]
            _check_format(value.__self__, [*values, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template calls; its own arguments follow the context and the function."""
        self._step()
        _context, function, *arguments = args
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            self._check_text_call(function.__name__, [owner, *arguments], kwargs)
        return super().call(*args, **kwargs)

    def limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter that checks its arguments."""
        begin = 1 if hasattr(function, "jinja_pass_arg") else 0

        def limited(*args: Any, **kwargs: Any) -> Any:
            self._step()
            arguments = list(args[begin:])
            if name == "join" and arguments:
                arguments[0] = list(self._counted(arguments[0]))
            self._check_text_call(name, arguments, kwargs)
            return function(*args[:begin], *arguments, **kwargs)

        vars(limited).update(getattr(function, "__dict__", {}))
        return limited

    def _check_text_call(self, name: str, given: list[Any], named: Mapping[str, Any]) -> None:
        """Checks a call of a filter, or of a method of a text, whose result may be large."""
        numbers = [x for x in (*given, *named.values()) if isinstance(x, int)]
        if name in INCREASING and any(abs(number) > MAX_WIDTH for number in numbers):
            raise LimitError(
                f"{name} has the argument {max(numbers)}, but at most {MAX_WIDTH} is allowed"
            )
        if name == "format" and given and isinstance(given[0], str):
            _check_format(given[0], (*given[1:], *named.values()))
        texts = [x for x in (*given, *named.values()) if isinstance(x, str)]
        if name == "replace" and len(texts) > 2:
            self._check(texts[0].count(texts[1]) * len(texts[2]) + len(texts[0]))
        if name == "join" and given:
            rows = given[0] if not isinstance(given[0], str) else (*given[1:], ())[0]
            glue = given[0] if isinstance(given[0], str) else (*texts, "")[0]
            lengths = [len(x) if hasattr(x, "__len__") else 8 for x in rows or ()]
            self._check(sum(lengths) + len(glue) * len(lengths))

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._step()
            yield value

    def _step(self) -> None:
        local = self._local
        local.steps += 1
        if local.steps % STEPS_PER_CLOCK_CHECK == 0 and time.monotonic() > local.end:
            raise LimitError(f"it takes longer than {MAX_SECONDS:g} s")

    def _made(self, length: int) -> None:
        """Notes that a text or a list was made."""
        self._local.made += length
        self._check(self._local.made // MADE_SHARE)

    def _check(self, length: int) -> None:
        if length > MAX_LENGTH:
            raise LimitError(f"it produces more than {MAX_LENGTH} characters or elements")

    def _check_bits(self, left: Any, right: Any, bits: Callable[[int, int], int]) -> None:
        if isinstance(left, int) and isinstance(right, int) and bits(left, right) > MAX_BITS:
            raise LimitError(f"it computes a number of more than {MAX_BITS} bits")


INCREASING = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice")
)
"""Filters and methods that make a text or a list as large as a number says."""


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Checks the widths that a format has, itself or as values."""
    takes_widths = "*" in text or re.search(r"\{[^{}]*\{", text) is not None
    numbers = [abs(value) for value in values if isinstance(value, int)]
    if re.search(r"\d{5,}", text) or (takes_widths and max(numbers, default=0) > MAX_WIDTH):
        raise LimitError(f"it pads text to more than {MAX_WIDTH} characters")


def _added(tree: nodes.Template) -> nodes.Template:
    """Returns a template that joins texts by "+", which is checked, rather than "~"."""

    def added(node: nodes.Node) -> nodes.Node:
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, added(value))
            elif isinstance(value, list):
                setattr(node, field, [added(x) if isinstance(x, nodes.Node) else x for x in value])
        if not isinstance(node, nodes.Concat):
            return node
        first, *operands = (nodes.Filter(x, "string", [], [], None, None) for x in node.nodes)
        joined: nodes.Expr = first
        for operand in operands:
            joined = nodes.Add(joined, operand)
        return joined.set_lineno(node.lineno)

    changed = added(tree)
    assert isinstance(changed, nodes.Template)
    return changed
