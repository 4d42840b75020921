"""What guessed tokens are expected to bring; see `Policy.draft_tokens`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftRates:
    """How good and how fast guesses are.

    name: of what guesses, as it is asked for; accepted: the probability that a guess is right if
    those before it are; token_s: seconds of guessing a token of a sequence, while which nothing
    else is computed; device_bytes, token_bytes: what makes the guesses takes of the device's
    memory, and for each token of a sequence.
    """

    name: str = ""
    accepted: float = 0.0
    token_s: float = 0.0
    device_bytes: int = 0
    token_bytes: int = 0

    def tokens_a_pass(self, guesses: int) -> float:
        """Returns the expected number of tokens that a pass with so many guesses finds (Leviathan
        et al. 2023, equation 1): one, and the guesses until the first wrong one."""
        return sum(self.accepted**count for count in range(guesses + 1))

    def held(self, tokens: int) -> int:
        """Returns the bytes of the device's memory that guessing for some tokens takes."""
        return self.device_bytes + self.token_bytes * tokens

    @staticmethod
    def accepted_of(tokens_a_pass: float, guesses: int) -> float:
        """Returns the probability by which a pass with so many guesses finds so many tokens."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            is_less = DraftRates(accepted=middle).tokens_a_pass(guesses) < tokens_a_pass
            low, high = (middle, high) if is_less else (low, middle)
        return low
