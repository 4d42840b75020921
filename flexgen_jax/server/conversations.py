"""Conversations of agents as chat templates take them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

INSTRUCTIONS = ("system", "developer")
"""Roles of messages that say how to answer."""

NO_IMAGE = "[an image, which this model cannot see]"
"""Replaces an image in a tool's result: an error would end the agent's session, whose history keeps
the image."""


def in_turns(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns a conversation with at most one message of instructions, the first, and no two
    messages of the user in a row, since many templates refuse others.

    Later instructions are the user's, and neighbours are joined by an empty line. Codex sends two
    messages of instructions and two of the user; Claude Code sends instructions after the user's
    message.
    """
    turns: list[Mapping[str, Any]] = []
    for message in messages:
        role, before = message["role"], turns[-1] if turns else None
        if role in INSTRUCTIONS:
            is_first = before is None or (len(turns) == 1 and before["role"] in INSTRUCTIONS)
            role = before["role"] if before is not None and is_first else role
            role = role if is_first else "user"
        contents = [] if before is None else [before["content"], message["content"]]
        can_join = role in ("user", *INSTRUCTIONS) and all(isinstance(x, str) for x in contents)
        if before is not None and can_join and before["role"] == role:
            turns[-1] = {**before, "content": "\n\n".join(contents)}
        else:
            turns.append({**message, "role": role})
    return turns


def schema_format(schema: Any) -> dict[str, Any]:
    """Returns the "response_format" of a conversation whose answer is JSON of a schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def without_images(content: Any) -> Any:
    """Returns a tool's result with a text in place of each image."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": NO_IMAGE}
        if isinstance(part, dict) and part.get("type") in ("image", "input_image")
        else part
        for part in content
    ]
