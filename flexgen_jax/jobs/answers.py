"""Records of results: OpenAI's batch output format, or the plain one."""

from __future__ import annotations

import base64
import codecs
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from flexgen_jax.jobs.lines import Line, LineError
from flexgen_jax.models.tool_calls import ToolCall
from flexgen_jax.requests.outputs import RequestOutput, TokenLogprob
from flexgen_jax.requests.texts import TextModel

Name = Callable[[int], str]
"""Names a token."""


def failure(number: int, error: LineError, job: str) -> dict[str, Any]:
    """Returns the record of a line that could not be run."""
    error_entry = {"code": "invalid_request", "message": f"line {number}: {error}"}
    if error.is_plain:
        return {"id": error.name, "line": number, "error": error_entry}
    return {
        "id": _name("batch_req", job, number),
        "custom_id": error.name,
        "line": number,
        "response": None,
        "error": error_entry,
    }


def answer(
    line: Line, results: Sequence[RequestOutput], model: TextModel, job: str
) -> dict[str, Any]:
    """Returns the record of a line's results, one for each of its choices."""
    if not line.has_text:
        results = [_without_text(result) for result in results]
    if line.form == "plain":
        return _plain(line, results, model)
    if line.form == "embeddings":
        body = _embeddings(line, results, model)
    else:
        body = _texts(line, results, model, job)
    request_id = _name("req", job, line.number)
    return {
        "id": _name("batch_req", job, line.number),
        "custom_id": line.name,
        "line": line.number,
        "response": {"status_code": 200, "request_id": request_id, "body": body},
        "error": None,
    }


def _name(kind: str, job: str, number: int) -> str:
    return f"{kind}_{job}_{number}"


def _texts(
    line: Line, results: Sequence[RequestOutput], model: TextModel, job: str
) -> dict[str, Any]:
    """Returns a body with completions, or answers of conversations."""
    is_chat = line.form == "chat"
    choose = _chat_choice if is_chat else _completion_choice
    return {
        "id": _name("chatcmpl" if is_chat else "cmpl", job, line.number),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": line.model or model.name,
        "choices": [choose(n, result, line, model) for n, result in enumerate(results)],
        "usage": usage_of(line, results),
    }


def _without_text(result: RequestOutput) -> RequestOutput:
    """Returns a result without the token that a text of no tokens has in the engine."""
    logprobs: list[TokenLogprob] | None = None if result.logprobs is None else []
    return replace(result, text="", token_ids=[], logprobs=logprobs, finish_reason="length")


def _embeddings(line: Line, results: Sequence[RequestOutput], model: TextModel) -> dict[str, Any]:
    """Returns a body with the vectors of texts."""
    entries = []
    for index, result in enumerate(results):
        assert result.embedding is not None, "its request has a pooling"
        vector = model.pooling_defaults.vector(result.embedding, line.dimensions)
        written = vector.tolist()
        if line.is_base64:
            written = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        entries.append({"object": "embedding", "index": index, "embedding": written})
    tokens = sum(len(result.prompt_token_ids) for result in results)
    return {
        "object": "list",
        "data": entries,
        "model": line.model or model.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def usage_of(line: Line, results: Sequence[RequestOutput]) -> dict[str, Any]:
    """Returns the numbers of tokens of a line's prompts and results."""
    first_results = results[:: line.count]
    prompts = sum(len(result.prompt_token_ids) for result in first_results)
    num_tokens = sum(len(result.token_ids) for result in results)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": num_tokens,
        "total_tokens": prompts + num_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(result.cached_tokens for result in first_results)
        },
    }


def _plain(line: Line, results: Sequence[RequestOutput], model: TextModel) -> dict[str, Any]:
    usage, choices = usage_of(line, results), []
    for result in results:
        choice: dict[str, Any] = {
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
        }
        parts = model.answer(result, line.tools) if line.messages is not None else None
        if parts is not None:
            choice["text"] = parts.content or ""
            choice["finish_reason"] = finish_reason(result, bool(parts.calls))
            if parts.reasoning is not None:
                choice["reasoning_content"] = parts.reasoning
            if parts.calls:
                choice["tool_calls"] = _tool_calls(parts.calls, line.name)
        if result.logprobs is not None:
            choice["logprobs"] = [
                {"logprob": x.logprob, "top": [list(pair) for pair in x.top]}
                for x in result.logprobs
            ]
        choices.append(choice | _prompt_logprobs(result, line, model))
    choice_fields = choices[0] if line.count == 1 else {"choices": choices}
    return {"id": line.name, "line": line.number, **choice_fields, "usage": usage, "error": None}


def _completion_choice(
    index: int, result: RequestOutput, line: Line, model: TextModel
) -> dict[str, Any]:
    prompt = _text_of(result.prompt_token_ids, model) if line.echoes else ""
    return {
        "index": index,
        "text": prompt + result.text,
        "finish_reason": result.finish_reason,
        "logprobs": logprobs_of(result, line, model),
        **_prompt_logprobs(result, line, model),
    }


def _text_of(token_ids: Sequence[int], model: TextModel) -> str:
    """Returns the text of a prompt's tokens, without special ones."""
    shown = (model.piece(n) for n in token_ids if not model.is_hidden(n))
    return b"".join(shown).decode(errors="replace")


def _prompt_logprobs(result: RequestOutput, line: Line, model: TextModel) -> dict[str, Any]:
    """Returns the log-probabilities of a prompt's tokens in vLLM's form, by token id."""
    if result.prompt_logprobs is None or line.echoes:
        return {}
    entries: list[dict[str, Any] | None] = []
    pairs = zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)
    for token, logs in pairs:
        if logs is None:
            entries.append(None)
            continue
        ranks = {other: rank for rank, (other, _) in enumerate(logs.top, 1)}
        named = dict([*logs.top, (token, logs.logprob)])
        entries.append(
            {
                str(other): {
                    "logprob": logprob,
                    "rank": ranks.get(other),
                    "decoded_token": _shown(model.piece(other)),
                }
                for other, logprob in named.items()
            }
        )
    return {"prompt_logprobs": entries}


def logprobs_of(result: RequestOutput, line: Line, model: TextModel) -> dict[str, Any] | None:
    """Returns the log-probabilities of a result's tokens in OpenAI's form; None without any."""
    if result.logprobs is None:
        return None
    if line.form == "chat":
        pairs = zip(result.token_ids, result.logprobs, strict=True)
        return {"content": [_chat_token(n, x, line, model) for n, x in pairs], "refusal": None}

    def name(token: int) -> str:
        return _by_id(token) if line.names_by_id else _shown(model.piece(token), "bytes:")

    token_ids, logprobs = result.token_ids, list[TokenLogprob | None](result.logprobs)
    if line.echoes:
        token_ids = [*result.prompt_token_ids, *token_ids]
        logprobs = [*(result.prompt_logprobs or ()), *logprobs]
    pairs_of_all = zip(token_ids, logprobs, strict=True)
    return {
        "tokens": [name(token) for token in token_ids],
        "token_logprobs": [None if x is None else x.logprob for x in logprobs],
        "top_logprobs": [None if x is None else _by_name(n, x, name) for n, x in pairs_of_all],
        "text_offset": _offsets(token_ids, model),
    }


def _offsets(token_ids: Sequence[int], model: TextModel) -> list[int]:
    """Returns for each token how many whole characters come before it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    shown = (b"" if model.is_hidden(n) else model.piece(n) for n in token_ids)
    counts = [len(decoder.decode(piece)) for piece in shown]
    return list(accumulate(counts[:-1], initial=0))[: len(counts)]


def _by_name(token: int, logs: TokenLogprob, name: Name) -> dict[str, float]:
    """Returns log-probabilities by the tokens' names, the likeliest first; the token's own is among
    them. Of two tokens with one name, the second one is named by its id."""
    named: dict[str, float] = {}
    pairs = dict([*logs.top, (token, logs.logprob)])
    for other, logprob in pairs.items():
        token_name = name(other)
        named[_by_id(other) if token_name in named else token_name] = logprob
    return named


def _by_id(token: int) -> str:
    """Names a token as vLLM does."""
    return f"token_id:{token}"


def _shown(piece: bytes, before_bytes: str = "") -> str:
    """Names a token as OpenAI does: by its text, or by its bytes if it is a part of a character;
    completions have "bytes:" before these."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return before_bytes + "".join(f"\\x{byte:02x}" for byte in piece)


def _chat_choice(index: int, result: RequestOutput, line: Line, model: TextModel) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
    parts = model.answer(result, line.tools)
    if parts is not None:
        message["content"] = parts.content
        if parts.reasoning is not None and line.shows_reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = _tool_calls(parts.calls, f"{line.name} {index}")
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs_of(result, line, model),
        "finish_reason": finish_reason(result, parts is not None and bool(parts.calls)),
        **_prompt_logprobs(result, line, model),
    }


def finish_reason(result: RequestOutput, has_calls: bool) -> str:
    """Returns OpenAI's name for the end of an answer."""
    return "tool_calls" if has_calls and result.finish_reason == "stop" else result.finish_reason


def tool_call(call: ToolCall, answer: str, number: int) -> dict[str, Any]:
    """Returns a call in OpenAI's form. answer: identifies the answer; number: the call's in it."""
    return {
        "id": call.id or call_id(answer, number),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _tool_calls(calls: Sequence[ToolCall], answer: str) -> list[dict[str, Any]]:
    return [tool_call(call, answer, number) for number, call in enumerate(calls)]


def call_id(answer: str, number: int) -> str:
    """Returns a call's id, in the pattern of Mistral's templates: 9 letters or digits."""
    return hashlib.sha256(f"{answer} {number}".encode()).hexdigest()[:9]


def _chat_token(token: int, logs: TokenLogprob, line: Line, model: TextModel) -> dict[str, Any]:
    top = [_token(other, logprob, line, model) for other, logprob in logs.top]
    return {**_token(token, logs.logprob, line, model), "top_logprobs": top}


def _token(token: int, logprob: float, line: Line, model: TextModel) -> dict[str, Any]:
    piece = model.piece(token)
    name = _by_id(token) if line.names_by_id else _shown(piece)
    return {"token": name, "logprob": logprob, "bytes": list(piece)}
