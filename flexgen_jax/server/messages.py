"""Anthropic's `/v1/messages` as conversations: bodies, answers and events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexgen_jax.errors import TooLongError
from flexgen_jax.jobs.answers import call_id, finish_reason
from flexgen_jax.models.text_reader import Piece
from flexgen_jax.requests.outputs import RequestOutput
from flexgen_jax.server.bodies import own_id
from flexgen_jax.server.conversations import schema_format, without_images
from flexgen_jax.server.errors import RefusedError
from flexgen_jax.server.streams import Event

COPIED = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "thinking")
"""Fields that conversations have, too."""

WITHOUT_EFFECT = frozenset(("model", "metadata", "service_tier", "container", "context_management"))

CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}

REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "cancelled": "end_turn",
}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a request as one of `/v1/chat/completions`; raises `RefusedError`."""
    chat: dict[str, Any] = {key: body[key] for key in COPIED if key in body}
    system = body.get("system")
    messages = [] if not system else [{"role": "system", "content": _text(system, "system")}]
    rows = body.get("messages")
    if not isinstance(rows, list) or not rows:
        raise RefusedError(400, '"messages" must be a list of messages')
    for message in rows:
        messages += _messages(message)
    chat["messages"] = messages
    if "max_tokens" in body:
        chat["max_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedError(400, '"tools" must be a list of objects')
    # Tools that Anthropic runs itself have a type and no schema.
    own = [tool for tool in tools if "input_schema" in tool]
    if own:
        chat["tools"] = [_function(tool) for tool in own]
    _take_choice(body.get("tool_choice"), chat)
    _take_output(body.get("output_config"), chat)
    known = {*COPIED, *WITHOUT_EFFECT, "system", "messages", "max_tokens", "stop_sequences"}
    known |= {"tools", "tool_choice", "output_config"}
    return {**{key: body[key] for key in body if key not in known}, **chat}


def _take_output(wishes: Any, chat: dict[str, Any]) -> None:
    """Takes the effort of reasoning and the schema of the answer."""
    if not isinstance(wishes, dict):
        return
    if isinstance(wishes.get("effort"), str):
        chat["reasoning_effort"] = wishes["effort"]
    wish = wishes.get("format")
    if isinstance(wish, dict) and wish.get("type") == "json_schema":
        chat["response_format"] = schema_format(wish.get("schema"))


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _take_choice(choice: Any, chat: dict[str, Any]) -> None:
    if choice is None or not chat.get("tools"):
        return
    if not isinstance(choice, dict) or choice.get("type") not in (*CHOICES, "tool"):
        raise RefusedError(400, f'"tool_choice" must be auto, any, tool or none, not {choice!r}')
    if choice["type"] == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        chat["tool_choice"] = CHOICES[choice["type"]]
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _messages(message: Any) -> list[dict[str, Any]]:
    """Returns a message as one or more of a conversation: results of tools have messages of their
    own, before the user's text."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RefusedError(400, 'a message must have the "role" user or assistant')
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = content if isinstance(content, list) else []
    if not blocks or not all(isinstance(block, dict) for block in blocks):
        raise RefusedError(400, '"content" must be a text or a list of blocks')
    kinds = {block.get("type") for block in blocks}
    unknown = kinds - {"text", "tool_use", "tool_result", "thinking", "redacted_thinking"}
    if unknown:
        raise RefusedError(
            400, f"a block of type {sorted(map(str, unknown))[0]!r} is not supported"
        )
    made: list[dict[str, Any]] = [
        {
            "role": "tool",
            "tool_call_id": own_id(block.get("tool_use_id"), PREFIX),
            "content": _text(without_images(block.get("content") or ""), "tool_result"),
        }
        for block in blocks
        if block["type"] == "tool_result"
    ]
    texts = [block for block in blocks if block["type"] == "text"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    if not texts and not calls:
        return made
    own: dict[str, Any] = {"role": role, "content": _text(texts, "content") if texts else None}
    thoughts = [block.get("thinking", "") for block in blocks if block["type"] == "thinking"]
    if thoughts:
        own["reasoning_content"] = "".join(thoughts)
    if calls:
        own["tool_calls"] = [
            {
                "id": own_id(block.get("id"), PREFIX),
                "type": "function",
                "function": {"name": block.get("name"), "arguments": block.get("input") or {}},
            }
            for block in calls
        ]
    return [*made, own]


PREFIX = "toolu_"
"""The beginning of Anthropic's ids of calls."""


def _text(content: Any, name: str) -> str:
    """Returns a text, or the texts of blocks, a line each."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    texts = [block.get("text") if isinstance(block, dict) else None for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        raise RefusedError(400, f'"{name}" must be a text or a list of text blocks')
    return "\n".join(map(str, texts))


def named(error: RefusedError) -> RefusedError:
    """Returns an error with the message by which Claude Code knows a prompt that is too long."""
    cause = error.__cause__
    if not isinstance(cause, TooLongError):
        return error
    message = f"prompt is too long: {cause.tokens} tokens > {cause.limit} maximum"
    return RefusedError(error.status, message, error.code)


class MessageWriter:
    """An answer as a message, whole and in events.

    body: the message so far. model: the name that the client used.
    """

    def __init__(self, answer_id: str, model: str, num_prompt_tokens: int) -> None:
        self._id = answer_id
        self.body: dict[str, Any] = {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_prompt_tokens,
                "output_tokens": 0,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }
        self._arguments = ""

    def begin(self) -> Iterator[Event]:
        yield "message_start", {"type": "message_start", "message": {**self.body, "content": []}}

    def add(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        """Yields the events of some pieces."""
        blocks = self.body["content"]
        for piece in pieces:
            kind = {"content": "text", "reasoning": "thinking"}.get(piece.kind, "tool_use")
            if piece.kind == "call" or not blocks or blocks[-1]["type"] != kind:
                yield from self._end_block()
                yield from self._begin_block(kind, piece)
            if piece.kind == "call":
                continue
            if kind == "tool_use":
                self._arguments += piece.text
                delta = {"type": "input_json_delta", "partial_json": piece.text}
            else:
                blocks[-1][kind] += piece.text
                delta = {"type": f"{kind}_delta", kind: piece.text}
            event = {"type": "content_block_delta", "index": len(blocks) - 1, "delta": delta}
            yield "content_block_delta", event

    def _begin_block(self, kind: str, piece: Piece) -> Iterator[Event]:
        blocks = self.body["content"]
        block: dict[str, Any] = {"type": kind, kind: ""}
        if kind == "thinking":
            block["signature"] = ""
        elif kind == "tool_use":
            name = piece.call_id or call_id(self._id, len(blocks))
            block = {"type": kind, "id": f"{PREFIX}{name}", "name": piece.text, "input": {}}
        blocks.append(block)
        index = len(blocks) - 1
        event = {"type": "content_block_start", "index": index, "content_block": {**block}}
        yield "content_block_start", event

    def _end_block(self) -> Iterator[Event]:
        blocks = self.body["content"]
        if not blocks:
            return
        if blocks[-1]["type"] == "tool_use":
            try:
                blocks[-1]["input"] = json.loads(self._arguments or "{}")
            except ValueError:  # cut off by the limit of tokens
                blocks[-1]["input"] = {}
            self._arguments = ""
        yield "content_block_stop", {"type": "content_block_stop", "index": len(blocks) - 1}

    def end(self, result: RequestOutput, stop: str | None) -> Iterator[Event]:
        """Yields the last events. stop: the stop string that ended the answer."""
        if not self.body["content"]:
            yield from self._begin_block("text", Piece("content", ""))
        yield from self._end_block()
        has_calls = any(block["type"] == "tool_use" for block in self.body["content"])
        reason = REASONS[finish_reason(result, has_calls)]
        change = {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}
        self.body |= change
        usage = self.body["usage"]
        usage["output_tokens"] = len(result.token_ids)
        usage["cache_read_input_tokens"] = result.cached_tokens
        usage["input_tokens"] -= result.cached_tokens
        yield "message_delta", {"type": "message_delta", "delta": change, "usage": {**usage}}
        yield "message_stop", {"type": "message_stop"}

    def fail(self, message: str) -> Iterator[Event]:
        """Yields the event of an error after the beginning."""
        yield "error", {"type": "error", "error": {"type": "api_error", "message": message}}
