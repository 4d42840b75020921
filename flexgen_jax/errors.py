"""Exceptions that the user can act on."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """An error that the user can fix: the message states the problem, its place and the way out."""


class PromptError(UserError):
    """Some prompts cannot be continued.

    indices: positions of these prompts in the list that was given; the message names the first.
    """

    def __init__(self, message: str, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


class TooLongError(UserError):
    """A prompt that does not fit into the model's context.

    tokens: those of the prompt, at least; limit: the most that it may have.
    """

    def __init__(self, message: str, tokens: int, limit: int) -> None:
        super().__init__(message)
        self.tokens, self.limit = tokens, limit


class MachineError(UserError):
    """A fault of the machine or of the model's files, not of a request: a disk that cannot be read,
    memory that ran out, or weights that give no numbers."""


class StageError(RuntimeError):
    """A stage of a model ended or stopped answering; the message names it."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if that is empty."""
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__
