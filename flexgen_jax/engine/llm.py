"""The class `LLM`: continues prompts with a model that is spread over the three memory tiers."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import (
    Callable,
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    MutableSequence,
    Sequence,
)
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast, get_args

import jax

from flexgen_jax.cpu import kernels_of_device
from flexgen_jax.engine.batching import Waiting, made_batch, padded_length
from flexgen_jax.engine.feed import Feed, Incoming, Listed
from flexgen_jax.engine.grammar import Grammars
from flexgen_jax.engine.options import EngineOptions
from flexgen_jax.engine.out_of_memory import OutOfMemoryError, is_on_host, is_out_of_memory
from flexgen_jax.engine.outputs import (
    Admitted,
    Generation,
    OnFinished,
    OnOutput,
    OnToken,
    RequestOutput,
    TokenLogprob,
    failed,
)
from flexgen_jax.engine.pairs import Context, Split
from flexgen_jax.engine.planner import Planner
from flexgen_jax.engine.requests import (
    EncodedRequest,
    Encoder,
    Prefix,
    Request,
    check_ids,
    check_lengths,
    check_prompt,
    copies,
    impossible,
    shared_tokens,
    token_ids,
)
from flexgen_jax.engine.sampling import SamplingParams
from flexgen_jax.engine.scoring import PairScore, ScoreOutput, Scoring
from flexgen_jax.engine.session import Session
from flexgen_jax.engine.stages import Stages
from flexgen_jax.errors import (
    UserError,
    first_line,
)
from flexgen_jax.machine.caches import cache_folder
from flexgen_jax.machine.jax_settings import set_up_jax
from flexgen_jax.machine.profiles import read_profile
from flexgen_jax.machine.start import start_jax
from flexgen_jax.models.chat import ChatOptions, Message
from flexgen_jax.models.defaults import SamplingDefaults
from flexgen_jax.models.loading import open_model, resolve_dtype
from flexgen_jax.models.reasoning import Reasoning, split_reasoning
from flexgen_jax.offload.metrics import Metrics
from flexgen_jax.offload.trace import Trace
from flexgen_jax.policy.policy import GREEDY, SAMPLE, SCORE, Attention, Policy, Workload
from flexgen_jax.policy.schedule import Step
from flexgen_jax.progress import Progress
from flexgen_jax.units import parse_bytes

Prompts = str | Sequence[str]
Text = str | Sequence[int]
"""A text, or its token ids."""

Input = tuple[str | None, Sequence[int] | None] | UserError
"""A prompt's text and its token ids, one of which may be absent; or why there is no prompt."""

Encode = Callable[[Request, int], EncodedRequest]
"""Checks and encodes a request, given its place among all."""

OnError = Literal["return", "raise"]
"""What comes of prompts that cannot be continued."""

FIRST_READ = 16
"""Requests of a stream that are read before it is known how many run together."""

COMPILING_IS_LONG_S = 3.0
"""A run that has compiled for so long says that it does."""

UNKNOWN = 256
"""Requests for which a stream is planned as long as it has not ended."""


class LLM:
    """A language model whose weights, KV cache and activations lie where a policy puts them.

    model: a Hugging Face folder, a hub id, or None for the toy model that ships with the package.
    The other arguments are explained in `EngineOptions`.

    Raises `UserError` where something about these, or about a prompt, is wrong.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        policy: Policy | Literal["auto"] = EngineOptions.policy,
        dtype: str = EngineOptions.dtype,
        weight_bits: int | None = None,
        cache_bits: int | None = None,
        matmul_bits: int | None = None,
        attention: Attention | None = None,
        attention_sparsity: float | None = None,
        prefill_chunk: int | None = None,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        disk_space: str | int | None = None,
        write_limit: str | int | None = None,
        offload_dir: str | Path | None = None,
        dummy_weights: bool = False,
        seed: int = EngineOptions.seed,
        progress: bool = False,
        unified: bool | None = None,
        hardware: str | Path | None = None,
        breakdown: bool = False,
        trace: str | Path | None = None,
        stages: int = EngineOptions.stages,
        coordinator: str | None = None,
        sets_up_jax: bool = True,
    ) -> None:
        self._begin(
            EngineOptions(
                model=model,
                policy=policy,
                dtype=dtype,
                weight_bits=weight_bits,
                cache_bits=cache_bits,
                matmul_bits=matmul_bits,
                attention=attention,
                attention_sparsity=attention_sparsity,
                prefill_chunk=prefill_chunk,
                device_memory=device_memory,
                host_memory=host_memory,
                disk_space=disk_space,
                write_limit=write_limit,
                offload_dir=offload_dir,
                dummy_weights=dummy_weights,
                seed=seed,
                progress=progress,
                unified=unified,
                hardware=hardware,
                breakdown=breakdown,
                trace=trace,
                stages=stages,
                coordinator=coordinator,
                sets_up_jax=sets_up_jax,
            )
        )

    def _begin(self, asked: EngineOptions) -> None:
        """Opens the model, and finds out about the machine."""
        if asked.sets_up_jax:
            set_up_jax()
        device_memory, host_memory, disk_space = asked.budgets
        on_cpu = asked.stages > 1 or start_jax(host_memory)
        self._model = open_model(asked.model, asked.dummy_weights, asked.seed)
        self.config = self._model.config
        self._progress = Progress(asked.progress)
        self._finalizer: Any = None
        self._stages: Stages | None = None
        if asked.stages > 1:  # this process then computes nothing, and may have no device
            self._stages = Stages(asked, self.config, self._progress.say)
            self._finalizer = weakref.finalize(self, self._stages.close)
            on_cpu = self._stages.on_cpu
        self._notes = dict.fromkeys(self._model.notes)
        for note in self._notes:
            self._progress.say(f"flexgen-jax: {note}")
        self._grammars: Grammars | None = None
        if self._model.tokenizer is not None:
            self._grammars = Grammars(
                self._model.tokenizer, self.config.vocab_size, self.config.eos_ids
            )
        self.dtype = resolve_dtype(asked.dtype, self.config, on_cpu)
        unified = on_cpu if asked.unified is None else asked.unified
        if unified and not on_cpu:
            raise UserError("unified=True is for a CPU: a GPU has a memory of its own")
        policy = asked.policy_on(unified)
        formats = policy.formats(self.dtype)
        self._planner = Planner(
            config=self.config,
            dtype=self.dtype,
            policy=policy,
            is_auto=asked.is_auto,
            device_memory=device_memory,
            host_memory=host_memory,
            disk_space=disk_space,
            offload_dir=Path(asked.offload_dir or cache_folder("offload")).expanduser(),
            fingerprint=self._model.source.fingerprint(self.dtype) + formats.suffix,
            unified=unified,
            sizes=kernels_of_device().sizes if self._stages is None else self._stages.sizes,
            progress=self._progress,
            write_limit=parse_bytes(asked.write_limit, "write_limit"),
            profile=read_profile(asked.hardware) if asked.hardware is not None else None,
        )
        self._trace: Trace | None = None
        if asked.trace is not None:
            self._trace = Trace(Path(asked.trace), f"flexgen_jax, {self._model.name}")
        self._breakdown = asked.breakdown
        self._session: Session | None = None
        self._texts: Mapping[EncodedRequest, int] | None = {}
        self._running: Generation | Scoring | None = None
        self._upcoming: Generation | None = None
        self._latest: Generation | None = None
        self._is_closed = False
        self._ready: deque[RequestOutput] = deque()

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        skip: Container[int] = (),
        on_output: OnOutput | None = None,
        on_token: OnToken | None = None,
        prefix: Prefix | None = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Continues every prompt; the results are in the prompts' order.

        skip: indices of prompts that are left out as if they were done already; the random numbers
            of the others do not change.
        on_output: called with a prompt's index and its result as soon as it is finished, which is
            long before the last one is; an exception that it raises ends the run.
        on_token: called with a prompt's index as a text, or "index.number" for further texts of the
            same prompt, and each of its tokens.
        prefix: as in `Request`, with which all prompts begin.
        on_error: "return" gives a prompt that cannot be continued, such as one that is too long, a
            result whose `error` says why, and continues the others; "raise" raises a `PromptError`
            before anything is run. If none can be continued, that is raised in any case.
        """
        inputs = self._inputs(prompts, prompt_token_ids)
        return self._continued(inputs, sampling_params, skip, on_output, on_token, prefix, on_error)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        now: datetime | None = None,
        skip: Container[int] = (),
        on_output: OnOutput | None = None,
        on_token: OnToken | None = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several, as the model's chat template writes it.

        messages: [{"role": "user", "content": "..."}], or a list of such lists. The template gets
            them as they are, and so it does `tools`, `documents` and the variables in
            `chat_template_kwargs`, such as {"enable_thinking": False}.
        chat_template: a template's text, or the name of one of the folder's.
        add_generation_prompt, continue_final_message: as in transformers; the latter continues the
            last message in place of answering it.
        now: what the template takes as the present time; None is the time of the call.

        The other arguments and the results are those of `generate`; a result's prompt is the
        conversation as text. A conversation that the template refuses is like a prompt that cannot
        be continued.
        """
        if not messages:
            raise UserError("the list of messages is empty")
        many = [messages] if isinstance(messages[0], Mapping) else messages
        options = ChatOptions(
            tools=tools,
            documents=documents,
            variables=chat_template_kwargs or {},
            adds_generation_prompt=add_generation_prompt and not continue_final_message,
            continues_final=continue_final_message,
            template=chat_template,
            now=now or datetime.now(),
        )
        inputs: list[Input] = []
        for one in many:
            try:
                inputs.append(self.chat_prompt(cast("Sequence[Message]", one), options))
            except UserError as error:
                inputs.append(error)
        return self._continued(inputs, sampling_params, skip, on_output, on_token, None, on_error)

    def chat_prompt(
        self, messages: Sequence[Message], options: ChatOptions | None = None
    ) -> tuple[str, list[int]]:
        """Returns a conversation as the model's chat template writes it, and its token ids; raises
        `UserError` if the model's folder has no template, or if it refuses the messages."""
        chat, tokenizer = self._model.chat, self._model.tokenizer
        if chat is None or tokenizer is None:
            raise UserError("this model has no chat template: its weights are random")
        text = chat.render(messages, options)
        if chat.joins_parts:
            self.note(
                "the chat template takes texts alone: a message's list of parts is given to it as "
                "one text, a line for each part"
            )
        return text, tokenizer.encode(text, is_whole=True)

    def note(self, note: str, is_common: bool = False) -> None:
        """Says something once, and keeps it for the report. is_common: whether it is said once for
        all objects of this class together."""
        if note not in self._notes:
            self._notes[note] = None
            say = self._progress.say_once if is_common else self._progress.say
            say(f"flexgen-jax: {note}")

    @property
    def notes(self) -> list[str]:
        """What was said about how the model's files and the requests were taken."""
        return list(self._notes)

    def encode(self, text: str, is_whole: bool = False) -> list[int]:
        """Returns a text's token ids as of a prompt, with the special tokens that the model's
        folder asks for, unless the text `is_whole` and has its own; raises `UserError` if the model
        has no tokenizer."""
        if self._model.tokenizer is None:
            raise UserError(
                "texts need a tokenizer, and this model has none: give prompt_token_ids, or, to "
                "measure speed, use `flexgen-jax bench`"
            )
        return self._model.tokenizer.encode(text, is_whole)

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

    def reasoning(self, result: RequestOutput) -> Reasoning | None:
        """Returns the text of a result that begins with reasoning, such as after "<think>", in two
        parts; None for a text without."""
        tokenizer = self._model.tokenizer
        if tokenizer is None:
            return None
        return split_reasoning(tokenizer, result.prompt_token_ids, result.token_ids, result.text)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What the model's folder wants of sampling where a request says nothing."""
        return self._model.sampling

    def unfinished(self) -> list[tuple[str, list[int], list[TokenLogprob]]]:
        """Returns the id, the tokens so far and their log-probabilities, if asked for, of each
        request that is not finished: of the run under way, or of the last one as it ended. For
        `on_token`, and for what comes after an interruption."""
        return list(self._latest.unfinished()) if self._latest is not None else []

    def untaken(self) -> list[RequestOutput]:
        """Returns the results of the stream under way, or of the last one, that are finished and
        were not yielded; see `unfinished`."""
        return list(self._ready)

    def _continued(
        self,
        inputs: Sequence[Input],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        skip: Container[int],
        on_output: OnOutput | None,
        on_token: OnToken | None,
        prefix: Prefix | None,
        on_error: OnError,
    ) -> list[RequestOutput]:
        """Continues prompts; see `generate`."""
        if on_error not in get_args(OnError):
            raise UserError(f"on_error must be one of {get_args(OnError)}, not {on_error!r}")
        count = len(inputs)
        encoded, failures = self._requests(inputs, sampling_params)
        if failures and (on_error == "raise" or not encoded):
            raise impossible({index: str(result.error) for index, result in failures.items()})
        asked = [copy for r in encoded if r.index not in skip for copy in copies(r, count)]
        requests = self._sharing(asked, prefix)
        made: defaultdict[int, dict[int, RequestOutput]] = defaultdict(dict)
        results: dict[int, RequestOutput] = {}

        def finish(request: EncodedRequest, result: RequestOutput) -> None:
            index = request.index % count
            texts = made[index]
            texts[request.index] = result
            if len(texts) == request.params.n:
                first, *others = (text for _, text in sorted(texts.items()))
                results[index] = replace(first, others=tuple(others))
                if on_output is not None:
                    on_output(index, results[index])

        for index, result in failures.items():
            results[index] = result
            if on_output is not None:
                on_output(index, result)
        generation = self._generation(finish, on_token)
        generation.begin(requests)
        for _ in self._serve(Incoming(Listed(requests)), generation):
            pass
        return [result for _, result in sorted(results.items())]

    def _sharing(
        self, requests: list[EncodedRequest], prefix: Prefix | None
    ) -> list[EncodedRequest]:
        """Returns requests that know what they share of a prefix.

        One by itself shares nothing; see also `_shares`.
        """
        if isinstance(prefix, str):
            if self._model.tokenizer is None:
                raise UserError("a prefix as a text needs a tokenizer, and this model has none")
            prefix = self._model.tokenizer.encode(prefix)
        if not prefix or len(requests) < 2 or not self._shares:
            return requests
        return [replace(r, prefix_len=shared_tokens(r.prompt_ids, prefix)) for r in requests]

    def stream(
        self, requests: Iterable[Request], on_token: OnToken | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Continues requests as they come, and yields each result when it is finished.

        requests: an iterable, which may have no end. A thread reads it, no further ahead than the
            engine can use. What it raises is raised here, once all that was read is finished.
        on_token: called with a request's id and each of its tokens.

        An impossible request yields a result whose `error` says why. Closing the generator frees
        what is under way.
        """
        ready = self._ready = deque[RequestOutput]()
        generation = self._generation(lambda _, result: ready.append(result), on_token)
        self._upcoming = generation
        return self._streamed(requests, generation, ready)

    def _streamed(
        self, requests: Iterable[Request], generation: Generation, ready: deque[RequestOutput]
    ) -> Generator[RequestOutput, None, None]:
        feed = Feed(requests, partial(_encoded, self._encoder_of_single()), FIRST_READ)
        incoming = Incoming(Admitted(feed, generation, ready))
        try:
            for _ in self._serve(incoming, generation, feed.allow):
                while ready:
                    yield ready.popleft()
            yield from ready
            if feed.error is not None:
                raise feed.error
        finally:
            feed.close()

    def _encoder_of_single(self) -> Encode:
        """Returns how requests of one text each are encoded."""
        encoder = self._encoder

        def encode(request: Request, index: int) -> EncodedRequest:
            if request.sampling_params.n > 1:
                raise UserError("n is for generate and chat; give a stream the request n times")
            return encoder.encode(request, index)

        return encode

    @property
    def _encoder(self) -> Encoder:
        return Encoder(
            self.config, self._model.tokenizer, self._shares, self.resolved, self._grammars
        )

    @property
    def _shares(self) -> bool:
        """Whether requests can share a prefix: sparse attention chooses among all tokens of a
        sequence, a window begins elsewhere in each, longrope's frequencies depend on a sequence's
        length, and stages compute all that they are told."""
        is_apart = self._stages is not None or self._planner.policy.is_sparse
        return self._has_fixed_positions and not (is_apart or self.config.has_windows)

    @property
    def _has_fixed_positions(self) -> bool:
        """Whether keys do not depend on how long their sequence gets, as they do with longrope."""
        return self.config.short_positions is None

    @property
    def _branches(self) -> bool:
        """Whether a row may have several continuations: not with frequencies that depend on a
        sequence's length, nor in stages."""
        return self._stages is None and self._has_fixed_positions

    def cancel(self, request_id: str) -> None:
        """Ends a request with the tokens that it has, from `on_token` or another thread; its result
        says "cancelled". In `generate`, its id is the one that `on_token` has. One that is still to
        come from a stream's source, or of a stream that has not begun, ends before its first token;
        one that is finished stays as it is."""
        for generation in {self._running, self._upcoming}:
            if isinstance(generation, Generation):
                generation.cancel(request_id)

    def _generation(self, on_output: OnFinished, on_token: OnToken | None = None) -> Generation:
        tokenizer, ends = self._model.tokenizer, self.config.eos_ids
        return Generation(tokenizer, ends, on_output, on_token, self._grammars)

    def score(
        self,
        texts: Prompts | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        through_cache: bool = False,
    ) -> list[ScoreOutput]:
        """Returns the log-probabilities of every text's tokens except the first, for perplexity.

        through_cache: score token by token, as a generation goes, so that every token sees those
            before it through the KV cache; slower, and shows what a quantized cache costs.
        """
        given, ids = self._scorable(texts, prompt_token_ids)
        return self._scored(given, ids, through_cache, 0)

    def _scored(
        self,
        given: Sequence[str | None],
        ids: Sequence[Sequence[int]],
        through_cache: bool,
        prefix: int,
    ) -> list[ScoreOutput]:
        """Scores texts' tokens; see `score`. prefix: how many of the first tokens all have alike,
        which are computed once and not scored."""
        params, requests = SamplingParams(max_tokens=1), []
        for index, row in enumerate(ids):
            first, rest = tuple(row[:1]), tuple(row[1:])
            if through_cache and rest:
                requests.append(EncodedRequest(index, first, params, len(rest), rest))
            else:  # the last token is scored, but nothing follows it
                before, scored = tuple(row[:-1]) or first, rest[prefix:]
                requests.append(
                    EncodedRequest(index, before, params, 1, prefix_len=prefix, scored=scored)
                )
        check_lengths([[*r.prompt_ids, *r.forced[1:]] for r in requests], 0, self.config)
        return self._score_requests(requests, given)

    def _score_requests(
        self, requests: Sequence[EncodedRequest], given: Sequence[str | None]
    ) -> list[ScoreOutput]:
        scoring = Scoring()
        scoring.begin(requests)
        for _ in self._serve(Incoming(Listed(requests)), scoring):
            pass
        return scoring.outputs(given)

    def score_pairs(
        self,
        contexts: Sequence[str] | Sequence[Sequence[int]],
        continuations: Sequence[str] | Sequence[Sequence[int]],
        *,
        through_cache: bool = False,
    ) -> list[PairScore]:
        """Returns what each continuation is worth after its context, for choices among answers.

        contexts, continuations: texts, or token ids, of equal number. As texts, a pair is encoded
            together, and spaces at the context's end count as the continuation's. Tokens at the
            beginning of a context that do not fit into the model's are left out.
        through_cache: as in `score`.

        What all contexts begin with, such as examples, is computed once, or else the context that
        several continuations have. Raises `UserError` for a context without a token, and for a
        continuation without one or that does not fit by itself.
        """
        if len(contexts) != len(continuations):
            raise UserError(f"{len(contexts)} contexts, but {len(continuations)} continuations")
        rows, lengths = [], []
        for context, continuation in zip(contexts, continuations, strict=True):
            row, count = self._pair(cast("Text", context), cast("Text", continuation))
            most = self.config.max_positions + (not through_cache)
            if len(row) == count:
                raise UserError("a context has no token; give it the model's beginning token")
            if not 1 <= count < most:
                raise UserError(
                    f"a continuation has {count} tokens; after a context the model takes 1 to "
                    f"{most - 1}"
                )
            rows.append(row[-most:])
            lengths.append(count)
        if not rows:
            return []
        _, ids = self._scorable(None, rows)
        most = self.config.max_positions if self._branches else 0
        split = Split.of(ids, lengths, self._shares and not through_cache, most)
        scores: list[PairScore | None] = [None] * len(ids)
        alone = [ids[number] for number in split.alone]
        found = self._scored([None] * len(alone), alone, through_cache, split.prefix)
        for number, score in zip(split.alone, found, strict=True):
            tokens = ids[number][-lengths[number] :]
            scores[number] = PairScore.of(tokens, score.logprobs, score.greedy)
        for alike in split.branched.values():
            self._score_branches(alike, scores)
        return cast("list[PairScore]", scores)

    def _score_branches(
        self, contexts: Sequence[Context], scores: MutableSequence[PairScore | None]
    ) -> None:
        """Scores the continuations of contexts that have equally many, of about equal length."""
        requests = [c.encoded(n, self.config.pad_id) for n, c in enumerate(contexts)]
        found = self._score_requests(requests, [None] * len(requests))
        for context, score in zip(contexts, found, strict=True):
            start = 0
            for number, tokens in zip(context.numbers, context.continuations, strict=True):
                stop = start + len(tokens)
                part = slice(start, stop)
                scores[number] = PairScore.of(tokens, score.logprobs[part], score.greedy[part])
                start = stop

    def _pair(self, context: Text, continuation: Text) -> tuple[list[int], int]:
        """Returns the tokens of a context and its continuation, and how many the latter has."""
        if not isinstance(context, str) or not isinstance(continuation, str):
            return [*map(int, context), *map(int, continuation)], len(continuation)
        whole = self.encode(context + continuation)
        return whole, len(whole) - len(self.encode(context.rstrip(" ")))

    def _serve(
        self,
        incoming: Incoming[EncodedRequest],
        collector: Generation | Scoring,
        allow: Callable[[int], object] = lambda rows: None,
    ) -> Iterator[None]:
        """Walks all requests through the model, one step at a time.

        A plan that runs out of memory is replaced by a smaller one, which begins with the requests
        that are not finished; one that is too small for a request, by a larger one. allow: told how
        many requests may be read ahead.
        """
        self._check_open()
        if self._running is not None:
            raise UserError("this LLM is running already: finish or close its stream first")
        workload = None
        self._running = collector
        self._latest = collector if isinstance(collector, Generation) else None
        if isinstance(collector, Generation):
            collector.on_later = incoming.put_back
        if self._upcoming is collector:
            self._upcoming = None
        try:
            while incoming.wait():
                allow(1)  # no more than these while it is planned for them
                requests = incoming.take(FIRST_READ)
                if not requests:
                    yield  # all that came was impossible
                    continue
                incoming.put_back(requests)
                prefix = requests[0].prefix
                together = [r for r in requests if r.prefix == prefix]
                workload = self._workload(together, collector, workload)
                if not incoming.is_ended:
                    workload = replace(workload, num_sequences=max(len(requests), UNKNOWN))
                policy = self._policy_for(workload)
                allow(max(1, policy.batch_size * policy.num_batches // 2))
                try:
                    if self._stages is not None:
                        self._stages.open(policy, workload)
                        yield from self._run_stages(self._stages, incoming, collector)
                        continue
                    session = self._open(policy, workload)
                    yield from self._run(session, incoming, collector, prefix)
                except (MemoryError, jax.errors.JaxRuntimeError) as error:
                    self._back_off(error)
                    incoming.begin_again(collector.restart())
        finally:
            self._running = None
            self._texts = collector.texts if isinstance(collector, Generation) else {}

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError("this LLM is closed; make another one")

    def _back_off(self, error: Exception) -> None:
        """Plans for less after running out of memory; raises any other error, and this one if that
        is not possible."""
        if not is_out_of_memory(error):
            raise error
        what = first_line(error)
        if not self._planner.back_off(is_on_host(error)):
            if isinstance(error, UserError):
                raise error
            raise OutOfMemoryError(f"out of memory: {what}; {self._way_out()}") from error
        self._progress.say(f"flexgen-jax: out of memory, going on with less: {what}")
        self._close_session()

    def _way_out(self) -> str:
        if self._planner.is_auto:
            return "lower --device-memory or --host-memory, so that plans leave more room"
        return (
            "lower --batch-size or what lies in that memory, or leave out all that fixes the "
            "policy, and one is searched that gives way"
        )

    def _run(
        self,
        session: Session,
        incoming: Incoming[EncodedRequest],
        collector: Generation | Scoring,
        prefix: tuple[int, ...],
    ) -> Iterator[None]:
        before = collector.num_tokens
        plan = session.open_plan()
        is_scoring = isinstance(collector, Scoring)
        make = partial(made_batch, self.config, is_scoring)
        choices = collector if isinstance(collector, Generation) else None
        waiting = Waiting(plan, incoming, make, prefix, choices)
        session.start()

        def on_result(step: Step, result: Any) -> Sequence[int]:
            return collector.receive(waiting.members[step.batch], step.token, result)

        compiled_s, is_told = session.compile_s, False

        def step() -> None:
            nonlocal is_told
            tick()
            if not is_told and session.compile_s - compiled_s > COMPILING_IS_LONG_S:
                is_told = True
                self._progress.say(
                    "flexgen-jax: compiling programs for these lengths and formats; later runs "
                    "find them"
                )

        with self._progress.generating(collector.progress, lambda: session.compile_s) as tick:
            yield from session.run(plan, waiting, on_result, step)
        incoming.put_back(waiting.unfinished())
        padding = (waiting.prompt_tokens, waiting.padded_tokens)
        session.finish(waiting.entered, collector.num_tokens - before, padding)
        self._planner.observe(*session.disk_reads())

    def _run_stages(
        self,
        stages: Stages,
        incoming: Incoming[EncodedRequest],
        collector: Generation | Scoring,
    ) -> Iterator[None]:
        with self._progress.generating(collector.progress) as tick:
            for _ in stages.run(incoming, collector):
                tick()
                yield

    def _policy_for(self, workload: Workload) -> Policy:
        if self._stages is None:
            policy = self._planner.policy_for(workload)
            self._progress.detail(f"flexgen-jax: {workload} runs with {policy}")
            return policy
        return self._stages.policy_for(workload, self._planner.policy, self._planner.is_auto)

    def warm_up(self, prompt_len: int, gen_len: int, num_sequences: int) -> None:
        """Places the weights and compiles all programs that a greedy run of this shape needs."""
        self._check_open()
        workload = Workload(self._padded(prompt_len), gen_len, num_sequences)
        policy = self._policy_for(workload)
        if self._stages is not None:
            self._stages.open(policy, workload, compiles=True)
        else:
            self._open(policy, workload).compile(workload)

    def block_sequences(self, prompt_len: int, gen_len: int) -> int:
        """Returns how many sequences of these lengths one block of batches holds."""
        if self._stages is not None:
            policy = self._policy_for(Workload(self._padded(prompt_len), gen_len, 1))
            return policy.batch_size * policy.num_batches
        return self._planner.block_sequences(self._padded(prompt_len), gen_len)

    def _padded(self, prompt_len: int) -> int:
        return padded_length(prompt_len, self.config.max_positions)

    def resolved(self, params: SamplingParams, prompt_len: int = 0) -> SamplingParams:
        """Returns sampling parameters with the model's own defaults where they are not set; the
        first time that it samples for this reason, it says so. prompt_len: tokens of the prompt,
        which a folder's own limits may count."""
        wish = self._model.sampling
        if params.temperature is None and not wish.is_greedy:
            self.note(
                f"sampling as {self._model.name} asks for: temperature {wish.temperature:g}, top_k "
                f"{wish.top_k}, top_p {wish.top_p:g}; temperature 0 takes the likeliest tokens",
                is_common=True,
            )
        return params.with_defaults(wish, prompt_len)

    def __repr__(self) -> str:
        policy = "auto" if self._planner.is_auto else self._planner.policy
        state = ", closed" if self._is_closed else ""
        return f"LLM({self.name!r}, dtype={self.dtype!r}, policy={policy!r}{state})"

    @property
    def name(self) -> str:
        """The model's name: its folder's, or that of a known shape."""
        return self._model.name

    @property
    def fingerprint(self) -> str:
        """A text that identifies everything that the results depend on besides prompts and
        sampling: the weights, the tokenizer, the dtype, and the parts of the policy that lose
        precision. A copy of the model has an equal fingerprint."""
        policy = self._planner.policy
        lossy = f"{policy.weight_bits}-{policy.cache_bits}-{policy.attention_sparsity}"
        lossy += f"-{policy.matmul_bits}" if policy.matmul_bits < 16 else ""
        tokenizer = self._model.tokenizer.fingerprint if self._model.tokenizer else None
        return f"{self._model.source.content(self.dtype)}-{tokenizer}-{lossy}"

    @property
    def policy(self) -> Policy | None:
        """The policy of the last run; None before the first one."""
        if self._stages is not None:
            return self._stages.policy
        return self._session.policy if self._session else None

    def report(self) -> dict[str, Any]:
        """Returns the measurements of the last run: seconds, bytes, peaks, and the split between
        tiers; of stages also those of each, under "stages"."""
        if self._stages is not None and (found := self._stages.report()) is not None:
            return {
                "model": self._model.name,
                "dtype": self.dtype,
                "notes": self.notes,
                **found,
            }
        if self._session is None:
            raise UserError("nothing has been run yet")
        report = self._session.report()
        session = self._session
        predicted = self._planner.predicted(session.policy, session.workload, self._texts)
        return {
            "model": self._model.name,
            "dtype": self.dtype,
            "notes": self.notes,
            **report,
            "predicted": predicted,
        }

    def close(self) -> None:
        """Frees the tiers; files that later runs can reuse stay in the offload folder. Nothing can
        be run afterwards."""
        self._is_closed = True
        self._close_session()
        if self._trace is not None:
            self._trace.close()

    def _close_session(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._session = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, policy: Policy, workload: Workload) -> Session:
        """Returns a session with its weights in place; a new one if they must lie elsewhere."""
        if self._session is not None and self._session.suits(policy):
            self._session.adopt(policy, workload)
            return self._session
        self._close_session()
        session = Session(
            self.config,
            self.dtype,
            policy,
            workload,
            self._planner.budgets,
            self._planner.offload_dir,
            self._planner.unified,
            self._model.source,
            Metrics(self._trace, self._breakdown),
        )
        self._finalizer = weakref.finalize(self, session.close)
        self._session = session
        try:
            session.place(self._progress)
        except BaseException:
            self._close_session()
            raise
        return session

    def _inputs(
        self, prompts: Prompts | None, prompt_token_ids: Sequence[Sequence[int]] | None
    ) -> list[Input]:
        """Returns prompts, given as texts or as token ids."""
        if (prompts is None) == (prompt_token_ids is None):
            raise UserError("give either prompts or prompt_token_ids")
        given = prompts if prompt_token_ids is None else prompt_token_ids
        given = [given] if isinstance(given, str) and prompt_token_ids is None else given
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise UserError(f"prompts must be a list, not {type(given).__name__}")
        rows = list(given)
        if not rows:
            raise UserError("the list of prompts is empty")
        if prompt_token_ids is not None:
            if isinstance(rows[0], int):
                raise UserError("prompt_token_ids must be a list of lists: one for each prompt")
            return [(None, cast("Sequence[int]", row)) for row in rows]
        if self._model.tokenizer is None:
            self.encode("")  # says what to do
        for text in rows:
            check_prompt(text)
        return [(cast("str", text), None) for text in rows]

    def _scorable(
        self, prompts: Prompts | None, prompt_token_ids: Sequence[Sequence[int]] | None
    ) -> tuple[list[str | None], list[list[int]]]:
        """Returns texts to score, None where only ids were given, and their token ids."""
        texts, rows = [], []
        for index, (text, ids) in enumerate(cast("Any", self._inputs(prompts, prompt_token_ids))):
            rows.append(self.encode(text) if ids is None else token_ids(ids))
            texts.append(text)
            check_ids(rows[-1], index, self.config)
        return texts, rows

    def _requests(
        self,
        inputs: Sequence[Input],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[EncodedRequest], dict[int, RequestOutput]]:
        """Returns prompts as requests, and the results of those that cannot be continued."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(inputs)
        else:
            params = list(sampling_params)
        if len(params) != len(inputs):
            raise UserError(f"{len(inputs)} prompts, but {len(params)} sampling_params")
        encoder, requests, failures = self._encoder, list[EncodedRequest](), {}
        for index, (given, choice) in enumerate(zip(inputs, params, strict=True)):
            if isinstance(given, UserError):
                failures[index] = failed(Request(str(index), ""), str(given))
                continue
            text, ids = given
            request = Request(str(index), text, ids if text is None else None, choice)
            encoded = _encoded(partial(encoder.encode, ids=ids), request, index)
            if isinstance(encoded, RequestOutput):
                failures[index] = encoded
            else:
                requests.append(encoded)
        short = sum(r.whole_limit < r.params.most_tokens for r in requests)
        if short:
            self._progress.say(
                f"flexgen-jax: {short} of {len(inputs)} prompts leave room for fewer new tokens "
                f"than asked for, in the model's context of {self.config.max_positions}"
            )
        return requests, failures

    def _workload(
        self,
        requests: Sequence[EncodedRequest],
        collector: Generation | Scoring,
        before: Workload | None,
    ) -> Workload:
        """Returns the workload of requests that share one prefix, or none.

        before: of those in front of them, if more may come.
        """
        prefix = requests[0].prefix_len
        most = self.config.max_positions - prefix
        lengths = [padded_length(len(request.own_ids), most) for request in requests]
        mean = -(-sum(lengths) // len(lengths))
        head = SCORE if isinstance(collector, Scoring) else GREEDY
        if not all(request.params.is_plain for request in requests):
            head = SAMPLE
        found = Workload(
            prompt_len=max(lengths),
            gen_len=max(request.max_tokens for request in requests),
            num_sequences=len(requests),
            head=head,
            mean_prompt_len=mean if mean < max(lengths) else None,
            prefix_len=prefix,
        )
        return found if before is None else found.covering(before)


def _encoded(encode: Encode, request: Request, index: int) -> EncodedRequest | RequestOutput:
    """Returns a request encoded, or the result of an impossible one."""
    if not isinstance(request, Request):
        raise UserError(f"a stream takes objects of the class Request, not {request!r}")
    try:
        return encode(request, index)
    except UserError as error:
        return failed(request, str(error))
