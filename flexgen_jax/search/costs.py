"""Bytes and seconds of single operations of one model under a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate

from flexgen_jax.models.config import DTYPES
from flexgen_jax.models.spec import LayerSpec, ModelSpec
from flexgen_jax.models.spec_of_config import model_spec
from flexgen_jax.models.tensor_spec import Formats, TensorSpec
from flexgen_jax.policy.hardware import HardwareProfile
from flexgen_jax.policy.placement import stays_on_device
from flexgen_jax.policy.plan import BlockPlan
from flexgen_jax.policy.policy import Policy, prompt_chunks
from flexgen_jax.policy.shapes import BlockShape, Setting

READ_HEADS = 16
"""Maximum query heads per KV head for which attention takes the time of reading keys and values."""

UNPACK_ROWS = 16
"""Rows of the products whose times, with packed and with plain weights, tell that of unpacking."""


class ModelBytes:
    """Bytes and elements of a model's parts; methods of a layer take a decoder layer; `mean`
    averages over all layers."""

    def __init__(self, setting: Setting, policy: Policy) -> None:
        self.setting, self.policy = setting, policy
        self.formats: Formats = policy.formats(setting.dtype)
        self.spec: ModelSpec = model_spec(setting.config)
        self._item = DTYPES[setting.dtype]

    def plan(self, shape: BlockShape) -> BlockPlan:
        """Returns the plan of a block of batches."""
        return BlockPlan(self.setting, self.policy, shape)

    def mean(self, cost: Callable[[LayerSpec], float]) -> float:
        """Returns the average of a decoder layer's cost over all decoder layers."""
        (first, count), *others = self.spec.decoder_kinds
        if not others:
            return cost(first)
        total = count * cost(first) + sum(n * cost(layer) for layer, n in others)
        return total / len(self.spec.decoders)

    def chunks(self, prompt_len: int, scores_prompts: bool) -> tuple[int, ...]:
        """Returns the token counts of a prompt's prefill chunks."""
        chunk = prompt_len if scores_prompts else self.policy.prefill_chunk
        return prompt_chunks(prompt_len, chunk)

    def kv_elements(self, layer: LayerSpec, rows: int, tokens: float) -> float:
        """Elements that a layer keeps of some tokens: of keys and values."""
        return float(rows * tokens * layer.row_size)

    def attended_elements(self, layer: LayerSpec, rows: int, tokens: float) -> float:
        """Elements that reading takes as long as a token's attention to some tokens does: more than
        cached if so many query heads share them that compute binds."""
        heads = layer.attention.group * self.policy.pass_tokens if layer.attends else 1
        return self.kv_elements(layer, rows, tokens) * max(1.0, heads / READ_HEADS)

    def kv_bytes(self, layer: LayerSpec, rows: int, tokens: int) -> int:
        """Bytes of a layer's cached arrays of tokens, in sealed blocks: keys and values."""
        return sum(self.formats.sealed(leaf, rows, tokens).nbytes for leaf in layer.growing)

    def open_kv_bytes(self, layer: LayerSpec, rows: int, tokens: int) -> int:
        """Bytes of a layer's cached arrays of tokens in full precision."""
        return rows * tokens * layer.row_size * self._item

    def state_bytes(self, layer: LayerSpec, rows: int) -> int:
        """Bytes of a layer's recurrent state."""
        return rows * layer.state_bytes(self.formats.dtype)

    def moved_share(self, layer: LayerSpec) -> float:
        """Share of a layer's off-device cache that moves to the device for every token."""
        return self.policy.moved_share if layer.attends else 1.0

    def query_bytes(self, layer: LayerSpec, rows: int) -> int:
        """Bytes of a token's queries; 0 if a layer does not attend."""
        if not layer.attends:
            return 0
        return rows * layer.attention.query_size * self._item

    def hidden_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of the hidden states between two layers."""
        return self.spec.hidden_bytes(rows, tokens, self.formats.dtype)

    def keeps_states(self, rows: int) -> bool:
        """Returns whether a batch's hidden states after the prompt stay on the device regardless of
        the policy."""
        return stays_on_device(self.hidden_bytes(rows, self.policy.pass_tokens))

    def layer_bytes(self, layer: LayerSpec) -> int:
        """Bytes of a layer's large tensors, which a policy places."""
        return sum(n * self.formats.weight(t).nbytes for t, n in layer.large_shapes)

    def decode_bytes(self, layer: LayerSpec, rows: int) -> float:
        """Bytes of the large tensors that a decode step of `rows` sequences needs of a layer: all,
        or of experts those that are expected to be chosen, if they are few."""
        rates = self.setting.experts
        if not rates.few_are_chosen(layer, rows):
            return self.layer_bytes(layer)
        assert layer.experts is not None, "few of them are chosen"
        experts = [(t, n) for t, n in layer.large_shapes if t.expert is not None]
        nbytes = sum(n * self.formats.weight(t).nbytes for t, n in experts)
        unchosen = 1 - rates.chosen(layer, rows) / layer.experts.count
        return self.layer_bytes(layer) - nbytes * unchosen

    def tensor_bytes(self) -> float:
        """Returns the mean size of a decoder layer's tensors, weighted by their bytes: most bytes
        move in operations of about this size."""
        shapes = [
            (self.formats.weight(t).nbytes, count * layers)
            for layer, layers in self.spec.decoder_kinds
            for t, count in layer.large_shapes
        ]
        return sum(n * size * size for size, n in shapes) / sum(n * size for size, n in shapes)

    def expert_bytes(self, layer: LayerSpec) -> int:
        """Bytes of the large tensors of one of a layer's experts."""
        return sum(self.formats.weight(t).nbytes for t in layer.large_of_expert)

    def end_bytes(self) -> int:
        """Bytes of the large tensors of embedding and head; a shared table counts twice."""
        return sum(self.formats.weight(t).nbytes for t in self._end_tensors())

    def end_bytes_held(self) -> int:
        """Bytes of the large tensors of embedding and head; a shared table counts once."""
        held = {t.key: self.formats.weight(t).nbytes for t in self._end_tensors()}
        return sum(held.values())

    def _end_tensors(self) -> list[TensorSpec]:
        return [t for end in (self.spec.embedding, self.spec.head) for t in end.large]


class Costs(ModelBytes):
    """Seconds and bytes of single operations of one model on one machine.

    Costs that differ from layer to layer take a decoder layer; `mean` averages over all layers.
    """

    def __init__(self, setting: Setting, policy: Policy, hw: HardwareProfile) -> None:
        super().__init__(setting, policy)
        self.hw = hw
        is_dense = not setting.config.has_experts
        self.unpacks = is_dense and policy.unpacks(setting.sizes, policy.num_batches)
        bits = 16 if self.unpacks else policy.weight_bits
        self._linear = hw.products(bits, policy.matmul_bits)
        self._ends = hw.linear[policy.weight_bits]
        self._device = hw.device_attention[policy.cache_bits]
        self._host = hw.host_attention[policy.cache_bits]
        sparsity = policy.attention_sparsity
        self._read_share = (1 + sparsity) / 2  # all keys are read, and the values attended to

    @property
    def tokens_a_pass(self) -> float:
        """The tokens of a text that a pass after the prompt is expected to find."""
        policy = self.policy
        return self.setting.drafts.tokens_a_pass(policy.draft_tokens, policy.batch_size)

    @property
    def draft_s(self) -> float:
        """Seconds of guessing for a pass of a batch."""
        guesses = self.policy.draft_tokens * self.policy.batch_size
        return self.setting.drafts.token_s * guesses

    def linear_s(self, layer: LayerSpec, rows: float) -> float:
        """Seconds of a decoder layer's products: the paper's linear_layer, 8 h1^2 + 4 h1 h2 FLOPs
        per row.

        Of experts, those count that are expected to be chosen, each with its share of the rows.
        """
        experts = layer.experts
        if experts is None:
            return self._linear.seconds(layer.flops(rows), rows)
        routed = 2.0 * rows * experts.top * layer.expert_size
        shared = self._linear.seconds(layer.flops(rows) - routed, rows)
        return shared + self.experts_s(layer, rows)

    def experts_s(self, layer: LayerSpec, rows: float) -> float:
        """Seconds of the products of a layer's experts, a part of `linear_s`."""
        if layer.experts is None:
            return 0.0
        routed = 2.0 * rows * layer.experts.top * layer.expert_size
        rows_per_expert = rows * layer.experts.top / self.setting.experts.chosen(layer, rows)
        return self._linear.seconds(routed, rows_per_expert)

    def host_experts_s(self, layer: LayerSpec, rows: float, count: float, copied: float) -> float:
        """Seconds in which the CPU computes `count` of the experts that `rows` tokens choose, while
        the weights of `copied` others are read for copies to the device."""
        assert layer.experts is not None, "it has experts"
        rows_per_expert = rows * layer.experts.top / self.setting.experts.chosen(layer, rows)
        flops = 2.0 * rows_per_expert * count * layer.expert_size
        rate = self.hw.host_linear.get(self.policy.weight_bits)
        if rate is None:  # as fast as the CPU reads a KV cache
            seconds = flops / (2 * rows_per_expert * self.hw.host_attention[16].points[-1][1])
        else:
            seconds = rate.seconds(flops, rows_per_expert)
        if not self.hw.host_read:
            return seconds
        return max(seconds, (count + copied) * self.expert_bytes(layer) / self.hw.host_read)

    def planned_host_share(self, layer: LayerSpec, rows: float) -> float:
        """Returns the share of a layer's experts that the CPU computes if `rows` tokens choose."""
        share = 0.0 if self.setting.unified else self.policy.host_experts or 0.0
        return share if self.setting.experts.few_are_chosen(layer, rows) else 0.0

    def host_share(self) -> float:
        """Returns the share of the experts outside of the device that the CPU should compute; 0 if
        the round trip of the hidden states takes longer than the CPU saves.

        An expert takes t_c seconds on the CPU and t_p seconds to copy. If the CPU computes the
        share s of m experts, it takes s m t_c seconds, and the copies take (1 - s) m t_p seconds.
        Both are equal at s = t_p / (t_c + t_p).
        """
        policy, hw, rates = self.policy, self.hw, self.setting.experts
        layer = next((layer for layer in self.spec.decoders if layer.experts is not None), None)
        if layer is None or self.setting.unified or not hw.host_linear:
            return 0.0
        rows = policy.batch_size * policy.pass_tokens
        batches = policy.num_batches if policy.order.shares_weights else 1
        if not rates.few_are_chosen(layer, rows * batches):
            return 0.0
        chosen, distinct = rates.chosen(layer, rows), rates.chosen(layer, rows * batches)
        # A copy serves all batches of a visit; the CPU computes an expert for each of them.
        computed_s = self.host_experts_s(layer, rows, 1, 0) * batches * chosen / distinct
        nbytes = self.expert_bytes(layer)
        copied_s = hw.host_to_device.seconds(nbytes, nbytes / len(layer.large_of_expert))
        share = copied_s / (computed_s + copied_s)
        saved_s = distinct * share * copied_s - batches * hw.split_s
        return round(share, 3) if saved_s > 0 else 0.0

    def unpack_s(self, layer: LayerSpec) -> float:
        """Seconds of unpacking a decoder layer's weights for all batches of a visit; 0 if each
        product unpacks its own."""
        if not self.unpacks:
            return 0.0
        flops = 2.0 * UNPACK_ROWS * layer.large_size
        packed = self.hw.products(self.policy.weight_bits, 16)
        return max(
            0.0, packed.seconds(flops, UNPACK_ROWS) - self._linear.seconds(flops, UNPACK_ROWS)
        )

    def project_s(self, layer: LayerSpec, rows: int) -> float:
        """Seconds of a decoder layer's products before attention, a part of `linear_s`."""
        return layer.projected_share * self.linear_s(layer, rows)

    def prefill_s(
        self, layer: LayerSpec, rows: int, tokens: int, only_last: bool = False, before: int = 0
    ) -> float:
        """Seconds of a layer's prefill (comp^p): products, quantization, and attention with 4 s^2
        h1 FLOPs per sequence.

        only_last: for the last layer, which computes keys and values of all tokens, and everything
        else of one token per sequence. before: number of earlier tokens that a prompt's chunk
        attends to.
        """
        if only_last and layer.attends:
            group = self.setting.sizes.prefill_sequences(rows, tokens, self.policy.weight_bits)
            linear_s = rows / group * self.linear_s(layer, group)  # by groups, as all of a prefill
            share = layer.kept_share
            seconds = share * self.linear_s(layer, rows * tokens) + (1 - share) * linear_s
            attention = self.hw.device_attention[16]
            seconds += attention.seconds(self.kv_elements(layer, rows, tokens))
        else:
            scores = layer.mixer.prefill_flops(rows, tokens, before)
            seconds = self.linear_s(layer, rows * tokens)
            seconds += self.hw.prefill_attention.seconds(scores, tokens)
        if before:
            seconds += self._device.seconds(self.kv_elements(layer, rows, before))
        if self.policy.cache_bits < 16:
            seconds += self.quantize_s(self.kv_elements(layer, rows, tokens))
        return seconds

    def mean_prefill_s(self, rows: int, tokens: int, scores_prompts: bool) -> float:
        """Seconds of one layer's prefill, the average over all layers; in chunks as the policy
        says."""
        layers, last = len(self.spec.decoders), self.spec.decoders[-1]
        chunks = self.chunks(tokens, scores_prompts)
        seconds = 0.0
        for before, chunk in zip(accumulate((0, *chunks)), chunks, strict=False):
            of_all = partial(self.prefill_s, rows=rows, tokens=chunk, before=before)
            saved = of_all(last) - of_all(last, only_last=not scores_prompts)
            seconds += self.mean(of_all) - saved / layers
        return seconds

    def prefix_s(self, layer: LayerSpec, tokens: int, prefix: int) -> float:
        """Seconds of a layer's attention from `tokens` tokens of several rows to their shared
        prefix."""
        if not layer.attends:
            return 0.0
        scores = layer.attention.prefill_flops(1, tokens, prefix)
        scores -= layer.attention.prefill_flops(1, tokens)
        seconds = self.hw.prefill_attention.seconds(scores, prefix)
        return seconds + self._device.seconds(self.kv_elements(layer, 1, prefix))

    def quantize_s(self, elements: float) -> float:
        return self.hw.quantize.seconds(elements)

    def device_attention_s(self, layer: LayerSpec, rows: int, tokens: float) -> float:
        """Seconds of a layer's decode attention on the device (att^g on bmm_flops), or of its other
        mixer: it reads its cache, and reads and writes its recurrent state."""
        elements = self.attended_elements(layer, rows, tokens)
        elements += 2 * self.state_bytes(layer, rows) / self._item
        seconds = self._device.seconds(elements)
        if self.policy.is_sparse and layer.attends:
            ranking = self._rank_s(layer, rows, tokens, on_host=False)
            seconds = seconds * self._read_share + ranking
        return seconds

    def host_attention_s(self, layer: LayerSpec, rows: int, tokens: float) -> float:
        """Seconds of a layer's decode attention on the CPU (att^g on cpu_flops); 0 if it does not
        attend."""
        if not layer.attends:
            return 0.0
        seconds = self._host.seconds(self.attended_elements(layer, rows, tokens))
        if self.policy.is_sparse:
            ranking = self._rank_s(layer, rows, tokens, on_host=True)
            seconds = seconds * self._read_share + ranking
        return seconds

    def split_attention_s(
        self, layer: LayerSpec, rows: int, device_tokens: float, host_tokens: float
    ) -> tuple[float, float]:
        """Seconds of a layer's decode attention on the device and on the CPU.

        device_tokens: number of tokens on the device; host_tokens: number of tokens whose values
        stay on the host. With sparse attention on the device, the host blocks' keys are moved to
        it.
        """
        device = self.device_attention_s(layer, rows, device_tokens) if device_tokens else 0.0
        if self.policy.attends_on_host:
            return device, self.host_attention_s(layer, rows, host_tokens)
        elements = self.attended_elements(layer, rows, host_tokens)
        keys = self._device.seconds(elements) / 2 + self._rank_s(
            layer, rows, host_tokens, on_host=False
        )
        values = self._host.seconds(elements) * self.policy.attention_sparsity / 2
        return device + keys, values

    def _rank_s(self, layer: LayerSpec, rows: int, tokens: float, on_host: bool) -> float:
        rank = self.hw.host_rank if on_host else self.hw.device_rank
        return rank.seconds(rows * layer.attention.num_heads * tokens)

    def head_s(self, rows: int) -> float:
        """Seconds of the head's product."""
        return self._ends.seconds(self.spec.head.flops(rows), rows)

    def kv_read_s(self, layer: LayerSpec, rows: int, lengths: Iterable[int]) -> float:
        """Seconds of reading a layer's sealed blocks of these lengths from disk, one by one."""
        read = self.hw.disk_read
        return sum(
            count * read.seconds(self.kv_bytes(layer, rows, tokens))
            for tokens, count in Counter(lengths).items()
        )
