"""Records of results: OpenAI's batch output format, or the plain one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from flexgen_jax.engine.outputs import RequestOutput, TokenLogprob
from flexgen_jax.jobs.lines import Line, LineError

Piece = Callable[[int], bytes]
"""Returns the bytes that a token stands for."""


def failure(number: int, error: LineError, job: str) -> dict[str, Any]:
    """Returns the record of a line that could not be run."""
    said = {"code": "invalid_request", "message": f"line {number}: {error}"}
    if error.is_plain:
        return {"id": error.name, "line": number, "error": said}
    return {
        "id": _name("batch_req", job, number),
        "custom_id": error.name,
        "line": number,
        "response": None,
        "error": said,
    }


def answer(
    line: Line, results: Sequence[RequestOutput], model: str, job: str, piece: Piece
) -> dict[str, Any]:
    """Returns the record of a line's results, one for each of its choices."""
    usage = _usage(line, results)
    if line.form == "plain":
        return _plain(line, results, usage)
    is_chat = line.form == "chat"
    choose = _chat_choice if is_chat else _completion_choice
    body = {
        "id": _name("chatcmpl" if is_chat else "cmpl", job, line.number),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": line.model or model,
        "choices": [choose(n, result, piece) for n, result in enumerate(results)],
        "usage": usage,
    }
    request_id = _name("req", job, line.number)
    return {
        "id": _name("batch_req", job, line.number),
        "custom_id": line.name,
        "line": line.number,
        "response": {"status_code": 200, "request_id": request_id, "body": body},
        "error": None,
    }


def _name(kind: str, job: str, number: int) -> str:
    return f"{kind}_{job[:12]}_{number}"


def _usage(line: Line, results: Sequence[RequestOutput]) -> dict[str, int]:
    prompts = sum(len(result.prompt_token_ids) for result in results[:: line.count])
    made = sum(len(result.token_ids) for result in results)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


def _plain(line: Line, results: Sequence[RequestOutput], usage: dict[str, int]) -> dict[str, Any]:
    choices = []
    for result in results:
        choice: dict[str, Any] = {
            "text": result.text,
            "token_ids": result.token_ids,
            "finish_reason": result.finish_reason,
        }
        if result.logprobs is not None:
            choice["logprobs"] = [
                {"logprob": x.logprob, "top": [list(pair) for pair in x.top]}
                for x in result.logprobs
            ]
        choices.append(choice)
    found = choices[0] if line.count == 1 else {"choices": choices}
    return {"id": line.name, "line": line.number, **found, "usage": usage, "error": None}


def _completion_choice(index: int, result: RequestOutput, piece: Piece) -> dict[str, Any]:
    choice = {"index": index, "text": result.text, "finish_reason": result.finish_reason}
    if result.logprobs is None:
        return {**choice, "logprobs": None}
    tokens = [_text(token, piece) for token in result.token_ids]
    found = {
        "tokens": tokens,
        "token_logprobs": [x.logprob for x in result.logprobs],
        "top_logprobs": [
            _by_text(token, x, piece)
            for token, x in zip(result.token_ids, result.logprobs, strict=True)
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
    }
    return {**choice, "logprobs": found}


def _by_text(token: int, found: TokenLogprob, piece: Piece) -> dict[str, float]:
    """Returns log-probabilities by text, the likeliest first; the token's own is among them."""
    texts: dict[str, float] = {}
    for other, logprob in (*found.top, (token, found.logprob)):
        texts.setdefault(_text(other, piece), logprob)
    return texts


def _text(token: int, piece: Piece) -> str:
    return piece(token).decode(errors="replace")


def _chat_choice(index: int, result: RequestOutput, piece: Piece) -> dict[str, Any]:
    logprobs = None
    if result.logprobs is not None:
        pairs = zip(result.token_ids, result.logprobs, strict=True)
        content = [_chat_token(token, x, piece) for token, x in pairs]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": {"role": "assistant", "content": result.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": result.finish_reason,
    }


def _chat_token(token: int, found: TokenLogprob, piece: Piece) -> dict[str, Any]:
    top = [_token(other, logprob, piece) for other, logprob in found.top]
    return {**_token(token, found.logprob, piece), "top_logprobs": top}


def _token(token: int, logprob: float, piece: Piece) -> dict[str, Any]:
    found = piece(token)
    text = found.decode(errors="replace")
    return {"token": text, "logprob": logprob, "bytes": list(found)}
