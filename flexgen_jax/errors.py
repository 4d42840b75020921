"""What is the user's to mend."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """Something outside this package is wrong: the message says what, where and the way out."""


class PromptError(UserError):
    """Some prompts cannot be continued.

    indices: of these prompts, of which the message names the first.
    """

    def __init__(self, message: str, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__
