"""Marks of reasoning and of channels."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_jax.models.tokenizer import Tokenizer

REASONING_MARKS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<reasoning>": "</reasoning>",
    "<|channel>thought": "<channel|>",
    "<|channel>": "<channel|>",
}
"""The beginning of reasoning, and its end. A line break follows Gemma 4's "<|channel>thought"."""

HARMONY = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
"""Marks of Harmony's format, which are special tokens."""

LAST_TOKENS = 16
"""Tokens at a prompt's end that may have a mark."""


def opened_by(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str | None:
    """Returns the mark that will end the reasoning that a prompt begins; None if it begins none."""
    ids = prompt_ids[-LAST_TOKENS:]
    end = b"".join(map(tokenizer.piece, ids)).decode(errors="replace").rstrip()
    return next((close for mark, close in REASONING_MARKS.items() if end.endswith(mark)), None)
