"""A model and its texts: tokens, conversations, and what its folder wants."""

from __future__ import annotations

from collections.abc import Sequence

from flexgen_jax.errors import UserError
from flexgen_jax.models.chat import ChatOptions, Message
from flexgen_jax.models.defaults import SamplingDefaults
from flexgen_jax.models.loading import Model
from flexgen_jax.models.pooling import PoolingDefaults
from flexgen_jax.models.reasoning import Answer, split_reasoning
from flexgen_jax.models.tokenizer import Tokenizer
from flexgen_jax.models.tool_calls import Tools
from flexgen_jax.progress import Progress
from flexgen_jax.requests.outputs import RequestOutput
from flexgen_jax.requests.sampling import SamplingParams


class TextModel:
    """An opened model, as far as texts go; `LLM` can also run it."""

    def __init__(self, model: Model, progress: Progress) -> None:
        self._model, self._progress = model, progress
        self.config = model.config
        self._notes: dict[str, None] = {}
        for note in model.notes:
            self.note(note)

    @property
    def name(self) -> str:
        """The model's name: its folder's, or that of a known shape."""
        return self._model.name

    def chat_prompt(
        self, messages: Sequence[Message], options: ChatOptions | None = None
    ) -> tuple[str, list[int]]:
        """Returns a conversation as the model's chat template writes it, and its token ids; raises
        `UserError` if the model's folder has no template, or if it refuses the messages."""
        chat, tokenizer = self._model.chat, self._model.tokenizer
        if chat is None or tokenizer is None:
            raise UserError("a model with random weights has no chat template")
        text = chat.render(messages, options)
        if chat.joins_parts:
            self.note(
                "the chat template accepts text only: it gets a message's content parts as "
                "one text, one line per part"
            )
        return text, tokenizer.encode(text, is_whole=True, max_tokens=self.config.max_positions)

    def note(self, note: str, is_common: bool = False) -> None:
        """Says something once, and keeps it for the report. is_common: whether it is said once for
        all objects of this class together."""
        if note not in self._notes:
            self._notes[note] = None
            say = self._progress.say_once if is_common else self._progress.say
            say(f"flexgen-jax: {note}")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer; None with dummy weights."""
        return self._model.tokenizer

    @property
    def notes(self) -> list[str]:
        """What was said about how the model's files and the requests were taken."""
        return list(self._notes)

    def encode(self, text: str, is_whole: bool = False, max_tokens: int | None = None) -> list[int]:
        """Returns a text's token ids as of a prompt, with the special tokens that the model's
        folder asks for, unless the text `is_whole` and has its own; raises `UserError` if the model
        has no tokenizer, or if the text must have more than `max_tokens` tokens."""
        if self._model.tokenizer is None:
            raise UserError(
                "text prompts need a tokenizer, but this model has none: pass "
                "prompt_token_ids, or use `flexgen-jax bench` to measure speed"
            )
        return self._model.tokenizer.encode(text, is_whole, max_tokens)

    def special_id(self, role: str) -> int | None:
        """Returns the id of the tokenizer's special token with a role, such as "bos_token"; None
        without one."""
        tokenizer = self._model.tokenizer
        return None if tokenizer is None else tokenizer.special_id(role)

    def is_hidden(self, token_id: int) -> bool:
        """Returns whether a token is a special one, which texts do not have."""
        tokenizer = self._model.tokenizer
        return tokenizer is not None and token_id in tokenizer.special_ids

    def piece(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for within a text; b"" without a tokenizer."""
        tokenizer = self._model.tokenizer
        return b"" if tokenizer is None else tokenizer.piece(token_id)

    @property
    def chat_fingerprint(self) -> str | None:
        """Differs for models that write conversations differently."""
        return None if self._model.chat is None else self._model.chat.fingerprint

    @property
    def chat_tells_time(self) -> bool:
        """Whether the text of a conversation may depend on the time."""
        return self._model.chat is not None and self._model.chat.tells_time

    def answer(self, result: RequestOutput, tools: Tools | None = None) -> Answer | None:
        """Returns the reasoning, text and tool calls of a conversation's result; None if it has
        text only. tools: those that it may call."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            return None
        return split_reasoning(
            tokenizer, result.prompt_token_ids, result.token_ids, result.text, tools
        )

    @property
    def pooling_defaults(self) -> PoolingDefaults:
        """How the model's folder turns texts into vectors."""
        return self._model.pooling

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The model folder's sampling defaults."""
        return self._model.sampling

    def resolved(self, params: SamplingParams, prompt_len: int = 0) -> SamplingParams:
        """Returns sampling parameters with the model's own defaults where they are not set; the
        first time that it samples for this reason, it says so. prompt_len: tokens of the prompt,
        which a folder's own limits may count."""
        wish = self._model.sampling
        if params.temperature is None and not wish.is_greedy:
            self.note(
                f"using the sampling defaults of {self._model.name}: temperature "
                f"{wish.temperature:g}, top_k {wish.top_k}, top_p {wish.top_p:g} (temperature "
                "0 is greedy)",
                is_common=True,
            )
        return params.with_defaults(wish, prompt_len)
