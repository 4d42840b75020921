"""Reads one line of a file of requests: OpenAI's batch format, or a plain one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

from flexgen_jax.jobs.fields import TEXTS, without_neutral
from flexgen_jax.models.chat import ChatOptions, call_arguments
from flexgen_jax.models.tool_calls import Tools, tools_of
from flexgen_jax.requests.requests import Request
from flexgen_jax.requests.sampling import IN_REQUESTS, SamplingParams
from flexgen_jax.requests.texts import TextModel

Form = Literal["completions", "chat", "embeddings", "plain"]

URLS: dict[str, Form] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
}

MAX_CHOICES = 128
"""The maximum number of completions per line."""

MAX_INPUTS = 2048
"""The maximum number of texts of a request for embeddings, as in OpenAI's API."""

MAX_LINE_BYTES = 32 << 20
"""The most bytes of a line."""

MAX_ERROR_CHARS = 1000
"""Characters of an error's message, which may quote a line."""

DEFAULT_TOKENS = 16
"""New tokens of a completion that does not say how many, as in OpenAI's API."""

SOURCES = ("prompt", "prompt_token_ids", "messages")
NAMED = (
    "stop",
    "logit_bias",
    "n",
    "return_tokens_as_token_ids",
    "parallel_tool_calls",
    "include_reasoning",
    "adapter",
)
"""Fields of all forms besides the sampling parameters `IN_REQUESTS`."""


Prompt = tuple[str | None, Sequence[int] | None]
"""A text or token ids; of a conversation both."""


class LineError(ValueError):
    """A line that cannot be run. name: its id, if it has one; is_plain: whether it is of the plain
    form."""

    def __init__(self, message: str, name: str | None = None, is_plain: bool = False) -> None:
        super().__init__(
            message if len(message) <= MAX_ERROR_CHARS else f"{message[:MAX_ERROR_CHARS]}..."
        )
        self.name, self.is_plain = name, is_plain


@dataclass(frozen=True)
class Line:
    """What a line asks for.

    number: its place in the file, from 1; name: its id; prompts: texts, or token ids; messages: a
    conversation in their place; count: texts for each prompt; has_seed: whether it names a seed;
    model: the name in its body; chat: how a conversation is rendered, None for the usual way;
    names_by_id: whether tokens with log-probabilities are named "token_id:N"; echoes: whether the
    text begins with the prompt; has_text: whether it has new tokens at all; dimensions: of an
    embedding, None for all; is_base64: whether it is written as its bytes; adapter: the name of the
    one that it asks for, as OpenAI's `model` may do.
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
    chat: ChatOptions | None = None
    names_by_id: bool = False
    has_parallel_calls: bool = True
    shows_reasoning: bool = True
    echoes: bool = False
    has_text: bool = True
    dimensions: int | None = None
    is_base64: bool = False
    adapter: str | None = None

    @property
    def tools(self) -> Tools | None:
        """The tools that an answer may call; None for none."""
        if self.chat is None or not self.chat.tools:
            return None
        return tools_of(self.chat.tools, None if self.has_parallel_calls else 1)

    @property
    def choices(self) -> int:
        """How many texts it asks for."""
        return self.count * max(1, len(self.prompts))

    def prompts_for(self, model: TextModel, now: datetime) -> list[Prompt]:
        """Returns the texts and token ids of its prompts; raises `UserError` for a conversation
        that the model's chat template cannot write, and for vectors that it cannot make.

        now: the date for the template. A prompt without tokens is the token that begins or ends
        texts, as in OpenAI's API.
        """
        if self.messages is not None:
            options = self.chat
            if model.chat_tells_time or (options is not None and options.template):
                options = replace(options or ChatOptions(), now=now)
            return [model.chat_prompt(self.messages, options)]
        if self.form == "embeddings":
            model.pooling_defaults.check(self.dimensions, model.config.hidden_size)
        prompts: list[Prompt] = [
            (p, None) if isinstance(p, str) else (None, p) for p in self.prompts
        ]
        if "" not in self.prompts or model.encode(""):
            return prompts
        begins = [model.special_id(role) for role in ("bos_token", "eos_token")]
        first_ids = next(((token,) for token in begins if token is not None), None)
        if first_ids is None:
            return prompts
        return [(None, first_ids) if text == "" else (text, ids) for text, ids in prompts]

    def request(
        self,
        request_id: str,
        prompt: Prompt,
        model: TextModel,
        continued: Sequence[int] = (),
        place: int | None = None,
    ) -> Request:
        """Returns the request of one of its texts. continued, place: as in `Request`."""
        text, ids = prompt
        is_embedding = self.form == "embeddings"
        return Request(
            request_id,
            prompt=text if ids is None else None,
            prompt_token_ids=ids,
            sampling_params=self.params,
            is_chat=self.messages is not None,
            pooling=model.pooling_defaults.pooling if is_embedding else None,
            continued=continued,
            place=place,
            adapter=self._adapter_of(model),
        )

    def _adapter_of(self, model: TextModel) -> str | None:
        """Returns the name of the adapter that it asks for; notes the name of a model that is
        neither an adapter nor this model."""
        names, own_names = model.config.adapter_names, (model.name, Path(model.name).name)
        if self.adapter is not None or self.model is None or not names:
            return self.adapter
        if self.model in names:
            return self.model
        if self.model not in own_names:
            model.note(f"requests name the model {self.model!r}, which is no adapter's name")
        return None

    def error(self, message: str) -> LineError:
        """Returns the error of this line that says `message`."""
        return LineError(message, self.name, self.form == "plain")


OnUnknown = Callable[[str], object]
"""Called with the name of an unknown field, which is then ignored."""


def read_line(
    content: bytes,
    number: int,
    chat_tokens: int | None,
    seed: int,
    on_unknown: OnUnknown | None = None,
) -> Line:
    """Returns what a line asks for; raises `LineError` with the problem.

    chat_tokens: default number of new tokens of a conversation, None for the model folder's
    default; seed: for requests without one. on_unknown: None refuses unknown fields.
    """
    raw = _object(content)
    is_openai, name = _named(raw)
    line_id = name if isinstance(name, str) else None
    try:
        if not isinstance(name, str) or not name:
            which = "custom_id" if is_openai else "id"
            raise LineError(f'"{which}" must be a non-empty string, not {name!r}')
        if is_openai:
            return _from_openai(raw, name, number, chat_tokens, seed, on_unknown)
        return _from_plain(raw, name, number, chat_tokens, seed)
    except LineError as error:
        raise LineError(str(error), line_id, not is_openai) from None
    except (ValueError, TypeError, OverflowError, AttributeError, LookupError) as error:
        raise LineError(str(error), line_id, not is_openai) from None


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
    if len(content) >= MAX_LINE_BYTES:
        raise LineError(f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        raw = json.loads(content.decode("utf-8-sig"), parse_constant=_no_number)
        json.dumps(raw, ensure_ascii=False).encode()  # half of a pair of surrogates is no text
    except UnicodeError as error:
        raise LineError(f"not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise LineError(f"must be a JSON object, not {type(raw).__name__}")
    return raw


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}; use a number or null")


def _from_openai(
    raw: dict[str, Any],
    name: str,
    number: int,
    tokens: int | None,
    seed: int,
    on_unknown: OnUnknown | None,
) -> Line:
    _know(raw, {"custom_id", "method", "url", "body"})
    if raw.get("method", "POST") != "POST":
        raise LineError(f'"method" must be "POST", not {raw["method"]!r}')
    url, body = raw.get("url"), raw.get("body")
    if not isinstance(url, str) or url not in URLS:
        raise LineError(f'"url" must be one of {", ".join(URLS)}, not {url!r}')
    if not isinstance(body, dict):
        raise LineError(f'"body" must be an object, not {body!r}')
    fields, form = without_neutral(body), URLS[url]
    schema = _schema(fields.pop("response_format", {"type": "text"}))
    schemas = [schema, fields.pop("guided_json", None), fields.get("json_schema")]
    used_schemas = [schema for schema in schemas if schema is not None]
    if len(used_schemas) > 1:
        raise LineError('use only one of "response_format", "guided_json" and "json_schema"')
    if used_schemas:
        fields["json_schema"] = used_schemas[0]
    adds = fields.pop("add_special_tokens", form == "completions")
    if adds is not (form == "completions"):
        raise LineError(f'"add_special_tokens" must be {json.dumps(form == "completions")}')
    model = fields.pop("model", None)
    if form == "embeddings":
        return _embeddings(fields, (number, name), model)
    if model is not None and not isinstance(model, str):
        raise LineError(f'"model" must be a string, not {model!r}')
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    extras = _take_echo(fields, params) if form == "completions" else {}
    take = _take_completion if form == "completions" else _take_chat
    prompts, messages, chat = take(fields, params, tokens)
    if messages is not None:
        messages = tuple(map(_with_arguments, messages))
    known = {*IN_REQUESTS, *NAMED}
    if on_unknown is not None:
        for key in sorted({*fields} - known):
            on_unknown(key)
        fields = {key: value for key, value in fields.items() if key in known}
    line = _line(fields, params, (number, name, form, prompts, messages, chat), seed, model)
    return replace(line, **extras)


def _take_echo(fields: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Takes "echo" and a length of 0 out of a completion's fields; returns fields of the line.

    As in OpenAI's API and vLLM, a completion of no tokens computes its prompt.
    """
    echoes = fields.pop("echo", False)
    if not isinstance(echoes, bool):
        raise LineError(f'"echo" must be true or false, not {echoes!r}')
    if echoes and fields.get("logprobs") is not None:
        params["prompt_logprobs"] = _limited("logprobs", fields["logprobs"], 5)
    has_text = fields.get("max_tokens", DEFAULT_TOKENS) != 0
    if not has_text:
        fields["max_tokens"] = 1
    return {"echoes": echoes, "has_text": has_text}


def _embeddings(fields: dict[str, Any], named: tuple[int, str], model: str | None) -> Line:
    """Returns a line that asks for vectors of texts."""
    dimensions, encoding = fields.pop("dimensions", None), fields.pop("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise LineError(f'"encoding_format" must be "float" or "base64", not {encoding!r}')
    if dimensions is not None and not (_is_whole(dimensions) and dimensions > 0):
        raise LineError(f'"dimensions" must be a positive integer, not {dimensions!r}')
    try:
        prompts = _prompts(fields.pop("input", None))
    except LineError as error:
        raise LineError(str(error).replace('"prompt"', '"input"')) from None
    if len(prompts) > MAX_INPUTS:
        raise LineError(f'"input" has {len(prompts)} texts; the limit is {MAX_INPUTS}')
    _know(fields, set())
    return Line(
        number=named[0],
        name=named[1],
        form="embeddings",
        prompts=prompts,
        messages=None,
        params=SamplingParams.plain(1),
        count=1,
        has_seed=True,
        model=model,
        dimensions=dimensions,
        is_base64=encoding == "base64",
    )


def _take_completion(fields: dict[str, Any], params: dict[str, Any], _tokens: int | None) -> Any:
    params["max_tokens"] = fields.pop("max_tokens", DEFAULT_TOKENS)
    if "logprobs" in fields:
        params["logprobs"] = _limited("logprobs", fields.pop("logprobs"), 5)
    return _prompts(fields.pop("prompt", "")), None, None


def _take_chat(fields: dict[str, Any], params: dict[str, Any], tokens: int | None) -> Any:
    most = fields.pop("max_completion_tokens", None)
    older = fields.pop("max_tokens", None)
    params["max_tokens"] = next((n for n in (most, older) if n is not None), tokens)
    asks, top = fields.pop("logprobs", False), fields.pop("top_logprobs", None)
    if not isinstance(asks, bool):
        raise LineError(f'"logprobs" must be true or false, not {asks!r}')
    if top not in (None, 0) and not asks:
        raise LineError('"top_logprobs" needs "logprobs": true')
    if asks:
        params["logprobs"] = _limited("top_logprobs", top or 0, 20)
    return (), _messages(fields.pop("messages", None)), _chat_options(fields)


def _chat_options(fields: dict[str, Any]) -> ChatOptions | None:
    """Takes out the fields that say how a conversation is rendered; None if there are none."""
    kinds: dict[str, type] = {
        "tools": list,
        "documents": list,
        "chat_template": str,
        "chat_template_kwargs": dict,
        "add_generation_prompt": bool,
        "continue_final_message": bool,
        "reasoning_effort": str,
        "enable_thinking": bool,
    }
    named = {name: fields.pop(name) for name in kinds if name in fields}
    for name, value in named.items():
        if not isinstance(value, kinds[name]):
            raise LineError(f'"{name}" must be {KIND_NAMES[kinds[name]]}, not {value!r}')
    for name in ("tools", "documents"):
        if not all(isinstance(each, dict) for each in named.get(name, ())):
            raise LineError(f'"{name}" must be a list of objects')
    _choose_tools(fields, named)
    if not named:
        return None
    variables = dict(named.get("chat_template_kwargs") or {})
    for name in ("reasoning_effort", "enable_thinking"):
        if name in named:
            variables.setdefault(name, named[name])
    continues = named.get("continue_final_message", False)
    if continues and named.get("add_generation_prompt"):
        raise LineError('"continue_final_message" and "add_generation_prompt" cannot be combined')
    return ChatOptions(
        tools=named.get("tools") or None,
        documents=named.get("documents") or None,
        variables=variables,
        adds_generation_prompt=named.get("add_generation_prompt", not continues),
        continues_final=continues,
        template=named.get("chat_template"),
    )


def _choose_tools(fields: dict[str, Any], named: dict[str, Any]) -> None:
    """Takes "tool_choice" out of the fields. Leaves in `named` the tools that it allows; where it
    demands a call, puts the schema of one into the fields."""
    choice, tools = fields.pop("tool_choice", "auto"), named.get("tools") or []
    mode, names = _tool_choice(choice)
    known = {name: tool for tool in tools for name in tools_of([tool]).schemas}
    unknown = sorted({*(names or ())} - {*known})
    if unknown:
        raise LineError(f'"tool_choice" names the tool {unknown[0]!r}, which "tools" lacks')
    if names is not None:
        named["tools"] = tools = [known[name] for name in names]
    if mode == "none":
        named.pop("tools", None)
    if mode != "required":
        return
    if not tools:
        raise LineError(f'"tool_choice" {choice!r} needs "tools"')
    if "json_schema" in fields:
        raise LineError('"tool_choice" cannot demand a call where "response_format" has a schema')
    fields["json_schema"] = tools_of(tools).forcing()


def _tool_choice(choice: Any) -> tuple[str, list[str] | None]:
    """Returns a choice's mode ("none", "auto" or "required"), and the tools that it names, None for
    all."""
    match choice:
        case "none" | "auto" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", [name]
        case {"type": "function", "name": str(name)}:
            return "required", [name]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]},
        } if all(isinstance(tool, dict) for tool in tools):
            return mode, [name for tool in tools for name in tools_of([tool]).schemas]
    raise LineError(
        '"tool_choice" must be "none", "auto", "required", {"type": "function", "function": '
        '{"name": ...}} or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": '
        f"[...]}}}}, not {choice!r}"
    )


KIND_NAMES: Mapping[type, str] = {
    list: "a list",
    str: "a string",
    dict: "an object",
    bool: "true or false",
}
"""Types of JSON as messages name them."""


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose tool calls have their arguments as objects, which OpenAI's API has as
    JSON texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = call_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _from_plain(raw: dict[str, Any], name: str, number: int, tokens: int | None, seed: int) -> Line:
    fields = without_neutral({key: value for key, value in raw.items() if key != "id"})
    sources = [key for key in SOURCES if key in fields]
    if len(sources) != 1:
        close = [key for key in fields if difflib.get_close_matches(key, SOURCES, 1, 0.8)]
        typos = [key for key in close if key not in SOURCES]
        hint = f'; "{typos[0]}" is not a field' if typos else ""
        raise LineError(f'needs one of "prompt", "prompt_token_ids" and "messages"{hint}')
    content, messages = fields.pop(sources[0]), None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    if sources == ["messages"]:
        messages = _messages(content)
    elif sources == ["prompt"] and isinstance(content, str):
        prompts = (content,)
    elif sources == ["prompt_token_ids"] and _are_ids(content):
        prompts = (tuple(content),)
    else:
        expected = "a text" if sources == ["prompt"] else "a list of token ids"
        raise LineError(f'"{sources[0]}" must be {expected}')
    direct_names = ("max_tokens", "logprobs")
    params: dict[str, Any] = {key: fields.pop(key) for key in direct_names if key in fields}
    chat = None
    if messages is not None:
        params.setdefault("max_tokens", tokens)
        chat = _chat_options(fields)
    return _line(fields, params, (number, name, "plain", prompts, messages, chat), seed, None)


def _line(
    fields: dict[str, Any], params: dict[str, Any], source: Any, seed: int, model: str | None
) -> Line:
    """Returns the line with the sampling parameters that are left in `fields`; raises `LineError`
    otherwise."""
    _know(fields, {*IN_REQUESTS, *NAMED})
    if fields.get("top_k") == -1:  # as in vLLM
        fields["top_k"] = 0
    names_by_id = fields.get("return_tokens_as_token_ids", False)
    if not isinstance(names_by_id, bool):
        raise LineError('"return_tokens_as_token_ids" must be true or false')
    is_parallel = fields.get("parallel_tool_calls", True)
    for name in ("parallel_tool_calls", "include_reasoning"):
        if not isinstance(fields.get(name, True), bool):
            raise LineError(f'"{name}" must be true or false')
    params |= {key: fields[key] for key in IN_REQUESTS if key in fields}
    params["seed"] = fields.get("seed", seed)
    if not isinstance(params.get("ignore_eos", False), bool):
        raise LineError(f'"ignore_eos" must be true or false, not {params["ignore_eos"]!r}')
    stop = fields.get("stop", ())
    if not isinstance(stop, str | list | tuple):
        raise LineError(f'"stop" must be a string or a list of strings, not {stop!r}')
    stop = [text for text in ([stop] if isinstance(stop, str) else stop) if text != ""]
    if "logit_bias" in fields:
        params["logit_bias"] = _biases(fields["logit_bias"])
    count = fields.get("n", 1)
    if not _is_whole(count) or not 1 <= count <= MAX_CHOICES:
        raise LineError(f'"n" must be an integer from 1 to {MAX_CHOICES}, not {count!r}')
    adapter = fields.get("adapter")
    if not isinstance(adapter, str | None):
        raise LineError(f'"adapter" must be a string, not {adapter!r}')
    number, name, form, prompts, messages, chat = source
    if count * max(1, len(prompts)) > MAX_CHOICES:
        raise LineError(
            f"more than {MAX_CHOICES} completions requested: {len(prompts)} prompts with n = "
            f"{count}"
        )
    return Line(
        number=number,
        name=name,
        form=form,
        prompts=prompts,
        messages=messages,
        params=SamplingParams(stop=stop, **params),
        count=count,
        has_seed="seed" in fields,
        model=model,
        chat=chat,
        names_by_id=names_by_id,
        has_parallel_calls=is_parallel,
        shows_reasoning=fields.get("include_reasoning", True),
        adapter=adapter,
    )


def _schema(raw: Any) -> Any:
    """Returns the JSON schema of a `response_format`, None for any text."""
    format_type = raw.get("type") if isinstance(raw, dict) else None
    if format_type == "text":
        return None
    if format_type == "json_object":
        return {"type": "object"}
    named = raw.get("json_schema") if format_type == "json_schema" else None
    if isinstance(named, dict) and isinstance(named.get("schema"), dict):
        return named["schema"]
    raise LineError(
        '"response_format" must be {"type": "text"}, {"type": "json_object"} or {"type": '
        f'"json_schema", "json_schema": {{"schema": ...}}}}, not {raw!r}'
    )


def _know(fields: Mapping[str, Any], known_names: set[str]) -> None:
    unknown = sorted(set(fields) - known_names)
    if unknown:
        raise LineError(f'unknown field "{unknown[0]}"')


def _prompts(raw: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(raw, str):
        return (raw,)
    if _are_ids(raw):
        return (tuple(raw),)
    if isinstance(raw, list) and raw:
        if all(isinstance(part, str) for part in raw):
            return tuple(raw)
        if all(_are_ids(part) for part in raw):
            return tuple(map(tuple, raw))
    raise LineError('"prompt" must be a string, token ids, or a list of either')


def _messages(raw: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(raw, list) or not raw:
        raise LineError('"messages" must be a list of objects with "role" and "content"')
    return tuple(map(_message, raw))


def _message(raw: Any) -> Mapping[str, Any]:
    """Returns a message unchanged."""
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        raise LineError('a message must be an object with a string "role"')
    content = raw.get("content")
    if content is not None and not isinstance(content, str | list):
        raise LineError(f'"content" must be a string or a list of parts, not {content!r}')
    if isinstance(content, list):
        return {**raw, "content": list(map(_part, content))}
    return raw


def _part(part: Any) -> Any:
    """Returns a part of a message as templates know it: texts of all names have one type."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in TEXTS:
        text = part.get(TEXTS[kind])
        if not isinstance(text, str):
            raise LineError(f'a part of type "{kind}" must have a string "{TEXTS[kind]}"')
        return part if kind == "text" else {"type": "text", "text": text}
    if kind == "thinking":
        return part
    if kind is None:
        raise LineError(f'"content" has a part without a "type": {part!r}')
    raise LineError(f'"content" has a part of type "{kind}", but only text is supported')


def _biases(raw: Any) -> dict[int, float]:
    if not isinstance(raw, dict):
        raise LineError(f'"logit_bias" must be an object, not {raw!r}')
    try:
        return {int(token): bias for token, bias in raw.items()}
    except ValueError:
        raise LineError('the keys of "logit_bias" must be token ids') from None


def _limited(name: str, value: Any, maximum: int) -> int:
    if not _is_whole(value) or not 0 <= value <= maximum:
        raise LineError(f'"{name}" must be an integer from 0 to {maximum}, not {value!r}')
    return int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(raw: Any) -> bool:
    return isinstance(raw, list) and bool(raw) and all(map(_is_whole, raw))
