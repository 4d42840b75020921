"""Records of results: OpenAI's batch output format, or the plain one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from flexgen_jax.engine.outputs import RequestOutput, TokenLogprob
from flexgen_jax.jobs.lines import Line, LineError

Decode = Callable[[Sequence[int]], str]


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
    line: Line, results: Sequence[RequestOutput], model: str, job: str, decode: Decode
) -> dict[str, Any]:
    """Returns the record of a line's results, one for each of its choices. decode: makes text of
    token ids."""
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
        "choices": [choose(n, result, decode) for n, result in enumerate(results)],
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


def _completion_choice(index: int, result: RequestOutput, decode: Decode) -> dict[str, Any]:
    choice = {"index": index, "text": result.text, "finish_reason": result.finish_reason}
    if result.logprobs is None:
        return {**choice, "logprobs": None}
    tokens = [decode([token]) for token in result.token_ids]
    offsets = [sum(map(len, tokens[:n])) for n in range(len(tokens))]
    found = {
        "tokens": tokens,
        "token_logprobs": [x.logprob for x in result.logprobs],
        "top_logprobs": [
            {decode([token]): logprob for token, logprob in x.top} for x in result.logprobs
        ],
        "text_offset": offsets,
    }
    return {**choice, "logprobs": found}


def _chat_choice(index: int, result: RequestOutput, decode: Decode) -> dict[str, Any]:
    logprobs = None
    if result.logprobs is not None:
        pairs = zip(result.token_ids, result.logprobs, strict=True)
        content = [_chat_token(token, x, decode) for token, x in pairs]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": {"role": "assistant", "content": result.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": result.finish_reason,
    }


def _chat_token(token: int, found: TokenLogprob, decode: Decode) -> dict[str, Any]:
    top = [_token(other, logprob, decode) for other, logprob in found.top]
    return {**_token(token, found.logprob, decode), "top_logprobs": top}


def _token(token: int, logprob: float, decode: Decode) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
