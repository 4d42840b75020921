"""Reads one line of a file of requests: OpenAI's batch format, or a plain one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from flexgen_jax.engine.sampling import SamplingParams

Form = Literal["completions", "chat", "plain"]

URLS: dict[str, Form] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}

MOST_CHOICES = 128
"""The most texts that one line may ask for."""

DEFAULT_TOKENS = 16
"""New tokens of a completion that does not say how many, as in OpenAI's API."""

SHARED = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
OWN = ("top_k", "min_p", "min_tokens", "repetition_penalty", "ignore_eos", "json_schema")
"""Parameters that all forms take as they are: those that OpenAI's API has, too, and others."""

IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier"}
"""Fields of OpenAI's bodies that change no text."""

MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
}
"""Fields that may be null or one of these; another value asks for what this engine does not do."""


class LineError(ValueError):
    """A line that cannot be run. name: its id, if it has one; is_plain: whether it is of the plain
    form."""

    def __init__(self, message: str, name: str | None = None, is_plain: bool = False) -> None:
        super().__init__(message)
        self.name, self.is_plain = name, is_plain


@dataclass(frozen=True)
class Line:
    """What a line asks for.

    number: its place in the file, from 1; name: its id; prompts: texts, or token ids; messages: a
    conversation in their place; count: texts for each prompt; has_seed: whether it names a seed;
    model: the name in its body.
    """

    number: int
    name: str
    form: Form
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Mapping[str, Any], ...] | None
    params: SamplingParams
    count: int
    has_seed: bool
    model: str | None

    @property
    def choices(self) -> int:
        """How many texts it asks for."""
        return self.count * max(1, len(self.prompts))

    def error(self, message: str) -> LineError:
        """Returns the error of this line that says `message`."""
        return LineError(message, self.name, self.form == "plain")


def read_line(content: bytes, number: int, chat_tokens: int, seed: int) -> Line:
    """Returns what a line asks for; raises `LineError`, which says what is wrong with it.

    chat_tokens: new tokens of a conversation that does not say how many; seed: for requests
    without one.
    """
    raw = _object(content)
    is_openai, name = _named(raw)
    known = name if isinstance(name, str) else None
    try:
        if not isinstance(name, str) or not name:
            which = "custom_id" if is_openai else "id"
            raise LineError(f'"{which}" must be a text that is not empty, not {name!r}')
        if is_openai:
            return _from_openai(raw, name, number, chat_tokens, seed)
        return _from_plain(raw, name, number, chat_tokens, seed)
    except LineError as error:
        raise LineError(str(error), known, not is_openai) from None
    except (ValueError, TypeError, OverflowError) as error:  # of `SamplingParams`
        raise LineError(str(error), known, not is_openai) from None


def line_name(content: bytes) -> str | None:
    """Returns a line's id as `read_line` finds it, also if it refuses the line; None if there is
    none."""
    try:
        name = _named(_object(content))[1]
    except LineError:
        return None
    return name if isinstance(name, str) else None


def _named(raw: Mapping[str, Any]) -> tuple[bool, Any]:
    """Returns whether a line is of OpenAI's format, and its id."""
    is_openai = "custom_id" in raw or "body" in raw
    return is_openai, raw.get("custom_id" if is_openai else "id")


def _object(content: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(content.decode("utf-8-sig"), parse_constant=_no_number)
        json.dumps(raw, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
    except UnicodeError as error:
        raise LineError(f"not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise LineError(f"not a JSON object but {type(raw).__name__}")
    return raw


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _from_openai(raw: dict[str, Any], name: str, number: int, tokens: int, seed: int) -> Line:
    _know(raw, {"custom_id", "method", "url", "body"})
    if raw.get("method", "POST") != "POST":
        raise LineError(f'"method" must be "POST", not {raw["method"]!r}')
    url, body = raw.get("url"), raw.get("body")
    if not isinstance(url, str) or url not in URLS:
        raise LineError(f'"url" must be one of {", ".join(URLS)}, not {url!r}')
    if not isinstance(body, dict):
        raise LineError(f'"body" must be an object, not {body!r}')
    given = {key: value for key, value in body.items() if value is not None}
    form = URLS[url]
    for key, allowed in MEANINGLESS.items():
        if key in given and given.pop(key) not in allowed:
            raise LineError(f'"{key}" is not supported by this engine but as null')
    for key in IGNORED - {"model"}:
        given.pop(key, None)
    schema = _schema(given.pop("response_format", {"type": "text"}))
    if schema is not None:
        if "json_schema" in given:
            raise LineError('give one of "response_format" and "json_schema"')
        given["json_schema"] = schema
    model = given.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise LineError(f'"model" must be a text, not {model!r}')
    wanted: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    take = _take_completion if form == "completions" else _take_chat
    prompts, messages = take(given, wanted, tokens)
    return _line(given, wanted, (number, name, form, prompts, messages), seed, model)


def _take_completion(given: dict[str, Any], wanted: dict[str, Any], _tokens: int) -> Any:
    wanted["max_tokens"] = given.pop("max_tokens", DEFAULT_TOKENS)
    if "logprobs" in given:
        wanted["logprobs"] = _limited("logprobs", given.pop("logprobs"), 5)
    return _prompts(given.pop("prompt", None)), None


def _take_chat(given: dict[str, Any], wanted: dict[str, Any], tokens: int) -> Any:
    most = given.pop("max_completion_tokens", None)
    older = given.pop("max_tokens", None)
    wanted["max_tokens"] = next((n for n in (most, older) if n is not None), tokens)
    asks, top = given.pop("logprobs", False), given.pop("top_logprobs", None)
    if not isinstance(asks, bool):
        raise LineError(f'"logprobs" must be true or false, not {asks!r}')
    if top is not None and not asks:
        raise LineError('"top_logprobs" needs "logprobs": true')
    if asks:
        wanted["logprobs"] = _limited("top_logprobs", top or 0, 20)
    return (), _messages(given.pop("messages", None))


def _from_plain(raw: dict[str, Any], name: str, number: int, tokens: int, seed: int) -> Line:
    given = {key: value for key, value in raw.items() if value is not None and key != "id"}
    sources = [key for key in ("prompt", "prompt_token_ids", "messages") if key in given]
    if len(sources) != 1:
        raise LineError('give one of "prompt", "prompt_token_ids" and "messages"')
    content, messages = given.pop(sources[0]), None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    if sources == ["messages"]:
        messages = _messages(content)
    elif sources == ["prompt"] and isinstance(content, str):
        prompts = (content,)
    elif sources == ["prompt_token_ids"] and _are_ids(content):
        prompts = (tuple(content),)
    else:
        kind = "a text" if sources == ["prompt"] else "a list of token ids"
        raise LineError(f'"{sources[0]}" must be {kind}')
    own = ("max_tokens", "logprobs")
    wanted: dict[str, Any] = {key: given.pop(key) for key in own if key in given}
    if messages is not None:
        wanted.setdefault("max_tokens", tokens)
    return _line(given, wanted, (number, name, "plain", prompts, messages), seed, None)


def _line(
    given: dict[str, Any], wanted: dict[str, Any], what: Any, seed: int, model: str | None
) -> Line:
    """Returns the line with the sampling parameters that are left in `given`; raises `LineError`
    for what is none."""
    known = {*SHARED, *OWN, "stop", "logit_bias", "n"}
    _know(given, known)
    wanted |= {key: given[key] for key in (*SHARED, *OWN) if key in given}
    wanted["seed"] = given.get("seed", seed)
    for key in ("ignore_eos",):
        if not isinstance(wanted.get(key, False), bool):
            raise LineError(f'"{key}" must be true or false, not {wanted[key]!r}')
    stop = given.get("stop", ())
    if not isinstance(stop, str | list | tuple):
        raise LineError(f'"stop" must be a text or a list of texts, not {stop!r}')
    if "logit_bias" in given:
        wanted["logit_bias"] = _biases(given["logit_bias"])
    count = given.get("n", 1)
    if not _is_whole(count) or not 1 <= count <= MOST_CHOICES:
        raise LineError(f'"n" must be a whole number from 1 to {MOST_CHOICES}, not {count!r}')
    number, name, form, prompts, messages = what
    if count * max(1, len(prompts)) > MOST_CHOICES:
        raise LineError(f"more than {MOST_CHOICES} texts: {len(prompts)} prompts, n = {count}")
    params = SamplingParams(stop=stop, **wanted)
    has_seed = "seed" in given
    return Line(number, name, form, prompts, messages, params, count, has_seed, model)


def _schema(found: Any) -> Any:
    """Returns the JSON schema of a `response_format`, None for any text."""
    kind = found.get("type") if isinstance(found, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = found.get("json_schema") if kind == "json_schema" else None
    if isinstance(named, dict) and isinstance(named.get("schema"), dict):
        return named["schema"]
    raise LineError(
        '"response_format" must be {"type": "text"}, {"type": "json_object"} or {"type": '
        f'"json_schema", "json_schema": {{"schema": ...}}}}, not {found!r}'
    )


def _know(given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise LineError(f'unknown field "{unknown[0]}"')


def _prompts(found: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(found, str):
        return (found,)
    if _are_ids(found):
        return (tuple(found),)
    if isinstance(found, list) and found:
        if all(isinstance(part, str) for part in found):
            return tuple(found)
        if all(_are_ids(part) for part in found):
            return tuple(map(tuple, found))
    raise LineError('"prompt" must be a text, token ids, or a list of texts or of token ids')


def _messages(found: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(found, list) or not found:
        raise LineError('"messages" must be a list of messages')
    return tuple(map(_message, found))


def _message(found: Any) -> Mapping[str, Any]:
    """Returns a message whose content is one text."""
    if not isinstance(found, dict) or not isinstance(found.get("role"), str):
        raise LineError('a message must be an object with a text as "role"')
    content = found.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and _is_text(p) else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise LineError('"content" has a part that is not of type "text"')
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise LineError(f'"content" must be a text, not {content!r}')
    return {**found, "content": content}


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text"


def _biases(found: Any) -> dict[int, float]:
    if not isinstance(found, dict):
        raise LineError(f'"logit_bias" must be an object, not {found!r}')
    try:
        return {int(token): bias for token, bias in found.items()}
    except ValueError:
        raise LineError('"logit_bias" must have token ids as its keys') from None


def _limited(name: str, value: Any, most: int) -> int:
    if not _is_whole(value) or not 0 <= value <= most:
        raise LineError(f'"{name}" must be a whole number from 0 to {most}, not {value!r}')
    return int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(map(_is_whole, found))
