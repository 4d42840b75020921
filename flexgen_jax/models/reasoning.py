"""An answer's reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flexgen_jax.models.answer_stream import AnswerStream
from flexgen_jax.models.text_reader import Piece
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.models.tool_calls import ToolCall, Tools


class Answer(NamedTuple):
    """The parts of an answer. reasoning: None without; content: None where the reasoning did not
    end, or where there are only calls."""

    reasoning: str | None
    content: str | None
    calls: tuple[ToolCall, ...] = ()


def split_reasoning(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    text: str,
    tools: Tools | None = None,
) -> Answer | None:
    """Returns the parts of an answer: the pieces of its `AnswerStream`, joined. None if it has
    neither reasoning nor calls.

    text: the answer, which a stop string may have cut off. tools: those that it may call.
    """
    stream = AnswerStream(tokenizer, prompt_ids, tools=tools)
    pieces = [piece for token in token_ids for piece in stream.add(token)] + stream.end()
    texts = {
        kind: "".join(piece.text for piece in pieces if piece.kind == kind)
        for kind in ("reasoning", "content")
    }
    calls = joined_calls(pieces)
    if not stream.has_reasoning and not calls:
        return None
    num_cut = len(tokenizer.decode(token_ids, before=prompt_ids)) - len(text)
    if num_cut > 0 and not calls:  # by a stop string
        last = "content" if texts["content"] else "reasoning"
        texts[last] = texts[last][: -num_cut or None]
    has_content = texts["content"] or (stream.has_content and not calls)
    return Answer(
        reasoning=texts["reasoning"] if stream.has_reasoning else None,
        content=texts["content"] if has_content else None,
        calls=calls,
    )


def joined_calls(pieces: Iterable[Piece]) -> tuple[ToolCall, ...]:
    """Returns the calls of an answer's pieces."""
    calls: list[ToolCall] = []
    for piece in pieces:
        if piece.kind == "call":
            calls.append(ToolCall(piece.text, "", piece.call_id))
        elif piece.kind == "arguments":
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + piece.text)
    return tuple(calls)
