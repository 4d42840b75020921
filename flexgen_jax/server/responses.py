"""OpenAI's `/v1/responses` as conversations: bodies, answers and events. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flexgen_jax.jobs.answers import call_id
from flexgen_jax.models.text_reader import Piece
from flexgen_jax.requests.outputs import RequestOutput
from flexgen_jax.server.bodies import own_id
from flexgen_jax.server.conversations import schema_format, without_images
from flexgen_jax.server.errors import RefusedError
from flexgen_jax.server.streams import Event

COPIED = ("model", "temperature", "top_p", "top_k", "seed", "stream", "parallel_tool_calls")
"""Fields that conversations have, too."""

WITHOUT_EFFECT = frozenset(
    (
        "store",
        "include",
        "metadata",
        "client_metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "truncation",
        "user",
        "background",
        "stream_options",
        "max_tool_calls",
    )
)
REFUSED = ("previous_response_id", "conversation", "prompt")
"""Fields that need stored responses or prompts."""

TEXTS = ("input_text", "output_text", "text", "refusal")


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a request as one of `/v1/chat/completions`; raises `RefusedError`."""
    for name in REFUSED:
        if body.get(name) is not None:
            raise RefusedError(400, f'"{name}" is not supported: no responses are stored')
    chat: dict[str, Any] = {key: body[key] for key in COPIED if body.get(key) is not None}
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RefusedError(400, '"input" must be a text or a list of items')
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for item in items:
        _add_item(messages, item)
    chat["messages"] = messages
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    effort = body["reasoning"].get("effort") if isinstance(body.get("reasoning"), dict) else None
    if effort is not None:
        chat["reasoning_effort"] = effort
    _take_tools(body, chat)
    _take_format(body.get("text"), chat)
    if isinstance(body.get("top_logprobs"), int) and body["top_logprobs"]:
        raise RefusedError(400, '"top_logprobs" is not supported in responses')
    known = {*COPIED, *WITHOUT_EFFECT, *REFUSED, "input", "instructions", "max_output_tokens"}
    known |= {"reasoning", "tools", "tool_choice", "text", "top_logprobs"}
    return {**{key: body[key] for key in body if key not in known}, **chat}


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Adds an item of the input to a conversation."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise RefusedError(400, f"a message must have a role, not {role!r}")
        messages.append({"role": role, "content": _text(item)})
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments", item.get("input"))
        call = {
            "id": own_id(item.get("call_id"), PREFIX),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": arguments},
        }
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        text = _text({"content": without_images(item.get("output", ""))})
        call = own_id(item.get("call_id"), PREFIX)
        messages.append({"role": "tool", "tool_call_id": call, "content": text})
    elif kind != "reasoning":
        raise RefusedError(400, f"an item of type {kind!r} is not supported")


PREFIX = "call_"
"""The beginning of OpenAI's ids of calls."""


def _text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if kind in TEXTS else None
        if not isinstance(text, str):
            raise RefusedError(400, f"a part of type {kind!r} is not supported: send text")
        texts.append(text)
    return "\n".join(texts)


def _take_tools(body: Mapping[str, Any], chat: dict[str, Any]) -> None:
    """Takes the functions among the tools, which are flat here; others are passed over."""
    if not isinstance(body.get("tools") or [], list):
        raise RefusedError(400, '"tools" must be a list of objects')
    functions = [
        {"type": "function", "function": {key: tool[key] for key in FUNCTION if key in tool}}
        for tool in body.get("tools") or ()
        if isinstance(tool, dict) and tool.get("type") == "function"
    ]
    if not functions:
        return
    chat["tools"] = functions
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = {"type": "allowed_tools", "allowed_tools": choice}
    if choice is not None:
        chat["tool_choice"] = choice


FUNCTION = ("name", "description", "parameters", "strict")


def _take_format(text: Any, chat: dict[str, Any]) -> None:
    wish = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wish, dict) or wish.get("type") == "text":
        return
    if wish.get("type") == "json_schema":
        wish = schema_format(wish.get("schema"))
    chat["response_format"] = wish


class ResponseWriter:
    """An answer as a response, whole and in events.

    body: the response so far.
    """

    def __init__(self, answer_id: str, model: str, num_prompt_tokens: int) -> None:
        self._id, self._number = answer_id, -1
        self.body: dict[str, Any] = {
            "id": f"resp_{answer_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }
        self._num_prompt_tokens = num_prompt_tokens

    def _event(self, event: str, /, **content: Any) -> Event:
        self._number += 1
        return event, {"type": event, "sequence_number": self._number, **content}

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response={**self.body, "output": []})
        yield self._event("response.in_progress", response={**self.body, "output": []})

    def add(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        """Yields the events of some pieces."""
        output = self.body["output"]
        kinds = {"content": "message", "reasoning": "reasoning"}
        for piece in pieces:
            kind = kinds.get(piece.kind, "function_call")
            if piece.kind == "call" or not output or output[-1]["type"] != kind:
                yield from self._end_item("completed")
                yield from self._begin_item(kind, piece)
            if piece.kind == "call":
                continue
            item, place = output[-1], self._place
            if kind == "function_call":
                item["arguments"] += piece.text
                name = "response.function_call_arguments.delta"
                yield self._event(name, **place, delta=piece.text)
                continue
            item["content"][0]["text"] += piece.text
            name = "output_text" if kind == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(
                f"response.{name}.delta", **place, content_index=0, delta=piece.text, **more
            )

    @property
    def _place(self) -> dict[str, Any]:
        output = self.body["output"]
        return {"item_id": output[-1]["id"], "output_index": len(output) - 1}

    def _begin_item(self, kind: str, piece: Piece) -> Iterator[Event]:
        output = self.body["output"]
        number = len(output)
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "function_call":
            name = piece.call_id or f"{PREFIX}{call_id(self._id, number)}"
            item |= {"id": f"fc_{self._id}_{number}", "call_id": name, "name": piece.text}
            item["arguments"] = ""
        elif kind == "message":
            item |= {"id": f"msg_{self._id}_{number}", "role": "assistant", "content": []}
        else:
            item |= {"id": f"rs_{self._id}_{number}", "summary": [], "content": []}
        output.append(item)
        yield self._event("response.output_item.added", output_index=number, item={**item})
        if kind == "function_call":
            return
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        yield self._event(
            "response.content_part.added", **self._place, content_index=0, part={**part}
        )

    def _end_item(self, status: str) -> Iterator[Event]:
        output = self.body["output"]
        if not output:
            return
        item, place = output[-1], self._place
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            name, more = "reasoning_text", {}
            if item["type"] == "message":
                name, more = "output_text", {"logprobs": list[Any]()}
            yield self._event(
                f"response.{name}.done", **place, content_index=0, text=part["text"], **more
            )
            yield self._event("response.content_part.done", **place, content_index=0, part={**part})
        yield self._event("response.output_item.done", output_index=len(output) - 1, item={**item})

    def end(self, result: RequestOutput, _stop: str | None) -> Iterator[Event]:
        """Yields the last events."""
        is_whole = result.finish_reason != "length"
        if not self.body["output"]:
            yield from self._begin_item("message", Piece("content", ""))
        yield from self._end_item("completed" if is_whole else "incomplete")
        num_tokens = len(result.token_ids)
        self.body["status"] = "completed" if is_whole else "incomplete"
        if not is_whole:
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        self.body["usage"] = {
            "input_tokens": self._num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt_tokens + num_tokens,
        }
        yield self._event(f"response.{self.body['status']}", response=self.body)

    def fail(self, message: str) -> Iterator[Event]:
        """Yields the event of an error after the beginning."""
        self.body["status"] = "failed"
        self.body["error"] = {"code": "server_error", "message": message}
        yield self._event("response.failed", response=self.body)
