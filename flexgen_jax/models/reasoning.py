"""Texts that begin with a model's reasoning, between marks such as "<think>" and "</think>"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexgen_jax.models.tokenizer import Tokenizer

MARKS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<reasoning>": "</reasoning>",
    "<|channel>thought": "<channel|>",
    "<|channel>": "<channel|>",
}
"""What reasoning begins with, and what it ends with."""

NAMES = {"<channel|>": "thought"}
"""What stands on the first line of reasoning that ends with a mark: Gemma 4's."""

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
"""Marks of Harmony's format, which are special tokens."""

FINAL = "final"
"""Harmony's channel for the user; other channels have reasoning and tool calls."""

LOOKED_AT = 16
"""Tokens at a prompt's end among which the mark is."""


class Reasoning(NamedTuple):
    """The two parts of a text. content: the text after the reasoning, None without an end mark."""

    reasoning: str
    content: str | None


def opened_by(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str | None:
    """Returns the mark that will end the reasoning which a prompt begins; None if it begins
    none."""
    ids = prompt_ids[-LOOKED_AT:]
    end = b"".join(map(tokenizer.piece, ids)).decode(errors="replace").rstrip()
    return next((close for mark, close in MARKS.items() if end.endswith(mark)), None)


def channels_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[tuple[str, str]]:
    """Returns the messages of a text in Harmony's format, that of gpt-oss, as pairs of a channel
    and a body: "<|channel|>analysis<|message|>It asks ...<|end|><|start|>assistant<|channel|>final
    <|message|>Hello" has ("analysis", "It asks ...") and ("final", "Hello"). A text in another
    format has no messages.
    """
    channel, message = (tokenizer.token_id(mark) for mark in ("<|channel|>", "<|message|>"))
    if channel is None or message is None or not token_ids or token_ids[0] != channel:
        return []
    marks = {tokenizer.token_id(mark) for mark in HARMONY}
    messages, name, ids = list[tuple[str, str]](), "", list[int]()
    is_body = False
    for token in (*token_ids, channel):
        if token not in marks:
            ids.append(token)
            continue
        if is_body:
            messages.append((name, tokenizer.decode(ids)))
        elif token == message:
            name = tokenizer.decode(ids).split(" ")[0].strip()
        is_body, ids = token == message, []
    return messages


def split_reasoning(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int], text: str
) -> Reasoning | None:
    """Returns a text's reasoning and the rest, if the prompt or the text begins with the mark; None
    without. token_ids: the text's tokens, which have marks that are special tokens, and the text
    has not."""
    channels = channels_of(tokenizer, token_ids)
    if channels:
        thought = "".join(body for name, body in channels if name != FINAL)
        answers = [body for name, body in channels if name == FINAL]
        return Reasoning(thought, "".join(answers) if answers else None)
    close, name = opened_by(tokenizer, prompt_ids), ""
    if close is None:
        mark = next((mark for mark in MARKS if text.lstrip().startswith(mark)), None)
        hidden = next(
            (m for m in MARKS if token_ids and tokenizer.token_id(m) == token_ids[0]), None
        )
        if mark is None and hidden is None:
            return None
        close = MARKS[mark or hidden or ""]
        name = NAMES.get(close, "")
        text = text.lstrip().removeprefix(mark) if mark else text
    reasoning, content = _divided(tokenizer, token_ids, text, close)
    return Reasoning(reasoning.removeprefix(name).removeprefix("\n" if name else ""), content)


def _divided(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str, close: str
) -> tuple[str, str | None]:
    """Returns the text before and after the mark `close`; without the mark, the second is None."""
    if close in text:
        reasoning, _, content = text.partition(close)
        return reasoning, content
    end = tokenizer.token_id(close)
    if end not in token_ids:
        return text, None
    reasoning = tokenizer.decode(token_ids[: token_ids.index(end)])
    return reasoning, text.removeprefix(reasoning)
