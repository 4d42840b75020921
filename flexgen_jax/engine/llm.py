"""The class `LLM`: continues prompts with a model that is spread over the three memory tiers."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack, cast, get_args

import numpy as np

from flexgen_jax.engine.options import EngineOptions, LLMOptions
from flexgen_jax.engine.report import Report
from flexgen_jax.engine.scorer import Scorer
from flexgen_jax.engine.serving import FIRST_READ, Serving
from flexgen_jax.engine.starting import make_runner, start
from flexgen_jax.errors import UserError
from flexgen_jax.models.chat import ChatOptions, Message
from flexgen_jax.models.loading import Model
from flexgen_jax.models.parts import Pooling
from flexgen_jax.models.pooling import PoolingDefaults
from flexgen_jax.policy.policy import Policy, Workload
from flexgen_jax.progress import Progress
from flexgen_jax.requests.feed import Feed, Incoming
from flexgen_jax.requests.generation import Admitted, Generation
from flexgen_jax.requests.grammar import Grammars
from flexgen_jax.requests.outputs import (
    OnFinished,
    OnOutput,
    OnToken,
    RequestOutput,
    TokenLogprob,
)
from flexgen_jax.requests.padding import padded_length
from flexgen_jax.requests.prompts import Input, PromptReader, Prompts, encoded_or_failed
from flexgen_jax.requests.requests import EncodedRequest, Prefix, Request, copies, impossible
from flexgen_jax.requests.sampling import SamplingParams
from flexgen_jax.requests.scoring import PairScore, ScoreOutput
from flexgen_jax.requests.texts import TextModel

OnError = Literal["return", "raise"]
"""Handling of prompts that cannot run."""


class LLM(TextModel):
    """A language model whose weights, KV cache and activations lie where a policy puts them.

    model: a Hugging Face folder, a GGUF file, a hub id, a `Model` of one's own arrays, or None for
    the toy model that ships with the package.
    Further arguments are explained in `EngineOptions`.

    Raises `UserError` where something about these, or about a prompt, is wrong.
    """

    def __init__(
        self, model: str | Path | Model | None = None, **options: Unpack[LLMOptions]
    ) -> None:
        asked = EngineOptions(model, **options)
        progress, on_cpu = Progress(asked.progress), start(asked)
        super().__init__(asked.open_model(), progress)
        self._runner = make_runner(asked, on_cpu, self._model, progress)
        self._finalizer = weakref.finalize(self, self._runner.close)
        self.dtype = self._runner.dtype
        tokenizer = self._model.tokenizer
        self._grammars: Grammars | None = None
        if tokenizer is not None:
            self._grammars = Grammars(tokenizer, self.config.vocab_size, self.config.eos_ids)
        shares = self._runner.shares_rows and self.config.short_positions is None
        has_branches = shares and self.config.all_attend
        shares = shares and not self._runner.given.is_sparse
        self._serving = Serving(self._runner, self.config, shares and asked.prefix_sharing)
        self._prompts = PromptReader(self, shares, self._grammars, progress)
        self._scorer = Scorer(self, self._serving, self._prompts, shares, has_branches)
        self._ready: deque[RequestOutput] = deque()

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        on_output: OnOutput | None = None,
        on_token: OnToken | None = None,
        prefix: Prefix | None = None,
        adapter: str | Sequence[str | None] | None = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Continues every prompt; the results are in the prompts' order.

        on_output: called with a prompt's index and its result as soon as it is finished; an
            exception that it raises ends the run.
        on_token: called with a prompt's index as a text, or "index.number" for further texts of the
            same prompt, and each of its tokens.
        prefix: the common prefix of all prompts, as in `Request`.
        adapter: the name of the LoRA adapter of all prompts, or of each; None is the model alone.
        on_error: "return" gives a prompt that cannot run (too long, for example) a result with
            `error`, and runs all other prompts; "raise" raises a `PromptError` before anything is
            run. If none can be continued, that is raised in any case.
        """
        inputs = self._prompts.inputs(prompts, prompt_token_ids)
        return self._continued(
            inputs=inputs,
            sampling_params=sampling_params,
            adapter=adapter,
            on_output=on_output,
            on_token=on_token,
            prefix=prefix,
            on_error=on_error,
        )

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
        adapter: str | Sequence[str | None] | None = None,
        on_output: OnOutput | None = None,
        on_token: OnToken | None = None,
        on_error: OnError = "return",
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several, as the model's chat template writes it.

        messages: [{"role": "user", "content": "..."}], or a list of such lists. The template gets
        them unchanged, and also `tools`, `documents` and the variables in `chat_template_kwargs`,
        such as {"enable_thinking": False}. chat_template: a template's text, or the name of one of
        the folder's. add_generation_prompt, continue_final_message: as in transformers;
        `continue_final_message` continues the last message instead of answering it. now: the date
        for the template; None is the time of the call.

        Further arguments and the results are those of `generate`; a result's prompt is the
        conversation as text. A conversation that the template refuses is like a prompt that cannot
        be continued.
        """
        if not messages:
            raise UserError("the list of messages is empty")
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
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
        for conversation in conversations:
            try:
                inputs.append(self.chat_prompt(cast("Sequence[Message]", conversation), options))
            except UserError as error:
                inputs.append(error)
        return self._continued(
            inputs=inputs,
            sampling_params=sampling_params,
            adapter=adapter,
            on_output=on_output,
            on_token=on_token,
            on_error=on_error,
        )

    def embed(
        self,
        prompts: Prompts | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> np.ndarray:
        """Returns a vector of every prompt, fp32 [prompt, dimensions].

        pooling: "last" takes the final hidden states of a prompt's last token, "mean" the mean over
            all tokens, "cls" the first token's. By default as the folder's sentence-transformers
            files say, or "last".
        normalize: whether vectors have length 1; by default as these files say, and True if there
            are none or `pooling` is given.
        dimensions: how many of the first elements a vector has; by default all.
        adapter: as in `generate`.
        """
        defaults = self.pooling_defaults if pooling is None else PoolingDefaults(pooling)
        if defaults.pooling not in get_args(Pooling):
            raise UserError(f"pooling must be one of {get_args(Pooling)}, not {pooling!r}")
        defaults.check(dimensions, self.config.hidden_size)
        inputs = self._prompts.inputs(prompts, prompt_token_ids)
        requests, failures = self._prompts.requests(
            inputs, SamplingParams.plain(1), pooling=defaults.pooling, adapter=adapter
        )
        if failures:
            raise impossible({index: str(result.error) for index, result in failures.items()})
        vectors: dict[int, np.ndarray] = {}

        def finish(request: EncodedRequest, result: RequestOutput) -> None:
            assert result.embedding is not None, "its request has a pooling"
            vectors[request.index] = defaults.vector(result.embedding, dimensions, normalize)

        self._serving.run_all(requests, self._generation(finish))
        return np.stack([vector for _, vector in sorted(vectors.items())])

    def unfinished(self) -> list[tuple[str, list[int], list[TokenLogprob]]]:
        """Returns the id, the tokens so far and their log-probabilities, if asked for, of each
        request that is not finished: of the current run, or of the last run at its end. For
        `on_token`, and after an interruption."""
        latest = self._serving.latest
        return list(latest.unfinished()) if latest is not None else []

    @property
    def latest_logprob(self) -> TokenLogprob | None:
        """The log-probabilities of the token that `on_token` is called with, if the request asked
        for them."""
        return None if self._serving.latest is None else self._serving.latest.latest_logprob

    def untaken(self) -> list[RequestOutput]:
        """Returns the finished results of the current or last stream that were not yielded; see
        `unfinished`."""
        return list(self._ready)

    def _continued(
        self,
        inputs: Sequence[Input],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None,
        on_output: OnOutput | None,
        on_token: OnToken | None,
        on_error: OnError,
        prefix: Prefix | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts; see `generate`."""
        if on_error not in get_args(OnError):
            raise UserError(f"on_error must be one of {get_args(OnError)}, not {on_error!r}")
        count = len(inputs)
        encoded, failures = self._prompts.requests(inputs, sampling_params, adapter=adapter)
        if failures and (on_error == "raise" or not encoded):
            raise impossible({index: str(result.error) for index, result in failures.items()})
        asked = [copy for r in encoded for copy in copies(r, count)]
        requests = self._prompts.sharing(asked, prefix)
        outputs: defaultdict[int, dict[int, RequestOutput]] = defaultdict(dict)
        results: dict[int, RequestOutput] = {}

        def finish(request: EncodedRequest, result: RequestOutput) -> None:
            index = request.index % count
            texts = outputs[index]
            texts[request.index] = result
            if len(texts) == request.params.n:
                first, *other_outputs = (text for _, text in sorted(texts.items()))
                results[index] = replace(first, others=tuple(other_outputs))
                if on_output is not None:
                    on_output(index, results[index])

        for index, result in failures.items():
            results[index] = result
            if on_output is not None:
                on_output(index, result)
        generation = self._generation(finish, on_token)
        self._serving.run_all(requests, generation)
        return [result for _, result in sorted(results.items())]

    def stream(
        self,
        requests: Iterable[Request],
        on_token: OnToken | None = None,
        lengths: tuple[int, int] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Continues requests as they come, and yields each result when it is finished.

        requests: an iterable, which may have no end. A thread reads it, no further ahead than the
            engine can use. Its exceptions are raised here, after all requests read so far are
            finished.
        on_token: called with a request's id and each of its tokens.
        lengths: of prompts and new tokens for the first plan; by default those of the first
            requests. A longer prompt waits until running requests are finished. A request with more
            new tokens continues after these with its text as its prompt.

        An impossible request yields a result whose `error` says why. Closing the generator cancels
        running requests.
        """
        ready = self._ready = deque[RequestOutput]()
        generation = self._generation(lambda _, result: ready.append(result), on_token)
        self._serving.upcoming = generation
        expected = None if lengths is None else self._serving.expected(*lengths)
        return self._streamed(requests, generation, ready, expected)

    def _streamed(
        self,
        requests: Iterable[Request],
        generation: Generation,
        ready: deque[RequestOutput],
        expected: Workload | None,
    ) -> Generator[RequestOutput, None, None]:
        at_once = None if expected is None else expected.gen_len
        encode = partial(encoded_or_failed, self._prompts.of_single(at_once))
        feed = Feed(requests, encode, FIRST_READ)
        incoming = Incoming(Admitted(feed, generation, ready))
        try:
            for _ in self._serving.serve(incoming, generation, feed.allow, expected):
                while ready:
                    yield ready.popleft()
            yield from ready
            if feed.error is not None:
                raise feed.error
        finally:
            feed.close()

    def check(self, request: Request) -> list[int]:
        """Returns a request's prompt as token ids; raises `UserError` for one that cannot run."""
        return list(self._prompts.of_single()(request, 0).given_ids)

    def cancel(self, request_id: str) -> None:
        """Ends a request with the tokens that it has, from `on_token` or another thread; its result
        says "cancelled". In `generate`, the id is that of `on_token`. One that is still to
        come from a stream's source, or of a stream that has not begun, ends before its first token;
        a finished request does not change."""
        self._serving.cancel(request_id)

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
        prompt_texts, ids = self._prompts.scorable(texts, prompt_token_ids)
        return self._scorer.texts(prompt_texts, ids, through_cache)

    def score_pairs(
        self,
        contexts: Sequence[str] | Sequence[Sequence[int]],
        continuations: Sequence[str] | Sequence[Sequence[int]],
        *,
        through_cache: bool = False,
    ) -> list[PairScore]:
        """Returns the score of each continuation after its context, for choosing among answers.

        contexts, continuations: texts, or token ids, of equal number. As texts, a pair is encoded
            together, and spaces at the context's end count as the continuation's. Tokens at the
            beginning of a context that do not fit into the model's are left out.
        through_cache: as in `score`.

        A common beginning of all contexts, such as examples, is computed once; otherwise each
        context with several continuations is. Raises `UserError` for an empty context, and for a
        continuation that is empty or too long.
        """
        return self._scorer.pairs(contexts, continuations, through_cache)

    def warm_up(self, prompt_len: int, gen_len: int, num_sequences: int) -> None:
        """Places the weights and compiles all programs that a greedy run of this shape needs."""
        self._serving.check_open()
        workload = Workload(self._padded(prompt_len), gen_len, num_sequences)
        self._runner.open(self._runner.policy_for(workload), workload, compiles=True)

    def block_sequences(self, prompt_len: int, gen_len: int) -> int:
        """Returns how many sequences of these lengths one block of batches holds."""
        return self._runner.block_sequences(self._padded(prompt_len), gen_len)

    def _padded(self, prompt_len: int) -> int:
        return padded_length(prompt_len, self.config.max_positions)

    def __repr__(self) -> str:
        policy = "auto" if self._runner.is_auto else self._runner.given
        state = ", closed" if self._serving.is_closed else ""
        return f"LLM({self.name!r}, dtype={self.dtype!r}, policy={policy!r}{state})"

    @property
    def fingerprint(self) -> str:
        """A text that identifies everything that the results depend on besides prompts and
        sampling: the weights, the tokenizer, the dtype, and the parts of the policy that lose
        precision. A copy of the model has an equal fingerprint. The first time, all of the model's
        files are read."""
        return self._identified(self._model.source.content(self.dtype))

    @property
    def files_fingerprint(self) -> str:
        """A `fingerprint` that is known at once, and differs for copies of the model's files."""
        return self._identified(self._model.fingerprint(self.dtype))

    def _identified(self, weights: str) -> str:
        policy = self._runner.given
        lossy = f"{policy.weight_bits}-{policy.cache_bits}-{policy.attention_sparsity}"
        lossy += f"-{policy.matmul_bits}" if policy.matmul_bits < 16 else ""
        lossy += f"-{policy.weight_format}" if policy.weight_bits < 16 else ""
        tokenizer = self._model.tokenizer.fingerprint if self._model.tokenizer else None
        return f"{weights}-{tokenizer}-{lossy}"

    @property
    def policy(self) -> Policy | None:
        """The policy of the last run; None before the first run."""
        return self._runner.policy

    @property
    def machine(self) -> str:
        """The profile of the machine that policies are searched for, in words."""
        return self._runner.machine

    def report(self) -> Report:
        """Returns the measurements of the last run: seconds, bytes, peaks, and the split between
        tiers; of stages also those of each, under "stages"."""
        measured = self._runner.report(self._serving.texts)
        if measured is None:
            raise UserError("nothing has run yet")
        described = {"model": self.name, "dtype": self.dtype, "notes": self.notes}
        return cast("Report", {**described, **measured})

    def close(self) -> None:
        """Frees the tiers; files that later runs can reuse stay in the offload folder. Nothing can
        be run afterwards."""
        self._serving.is_closed = True
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
