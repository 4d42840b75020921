"""A prompt's attention to itself, and a chunk's to one KV block.

XLA's CPU backend transposes queries, keys and values one by one and computes all products of
scores, half of them in vain, far below the machine's FLOP/s. Here a head's keys and values become
fp32 matrices on their way into the cache's layout, and its scores, of `ROWS` tokens at a time, stay
in the processor's first cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from flexgen_jax.cpu.jit.cache_format import CacheFormat
from flexgen_jax.cpu.jit.emit import F32, I32, I64, Array, Function, Value
from flexgen_jax.cpu.jit.handler import Call, compiled_handler
from flexgen_jax.cpu.jit.host_kernel import Arguments, HostKernel
from flexgen_jax.cpu.jit.instructions import LANES
from flexgen_jax.cpu.jit.softmax import cap, weigh
from flexgen_jax.cpu.jit.vectors import exp
from flexgen_jax.layers.attention import MASKED

ROWS, COLUMNS = 8, 2 * LANES
"""Rows and columns of a part of a product. All of it is summed in registers where these are
AVX-512's: 16 vectors of 32; elsewhere a quarter of it at a time: 8 half vectors of 16."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of fp32: an element of a row, and elements between rows."""

    array: Array
    pitch: Value | int


def emit_product(left: Matrix, right: Matrix, out: Matrix, count: Value | int) -> None:
    """Computes out = left @ right for `ROWS` rows and `COLUMNS` columns of out, over `count`
    elements of left's rows."""
    k = left.array.k
    height, width = (ROWS, COLUMNS) if k.processor.has_wide_vectors else (ROWS // 2, LANES)
    for top in range(0, ROWS, height):
        for first in range(0, COLUMNS, width):
            rows, columns = range(top, top + height), range(first, first + width, LANES)
            zero = k.filled(F32, LANES)
            sums = {(row, column): k.variable(zero) for row in rows for column in columns}
            with k.loop(count) as n:
                line = right.array.at(n * right.pitch)
                taken = {column: line.load(column, LANES) for column in columns}
                for row in rows:
                    factor = left.array.load(k.index(row) * left.pitch + n)
                    for column in columns:
                        total = sums[row, column]
                        total.set(k.fma(factor, taken[column], total.get()))
            for (row, column), total in sums.items():
                out.array.store(k.index(row) * out.pitch + column, total.get())


def _widen(of: CacheFormat, stored: Array, out: Array) -> None:
    """Converts a head's elements to fp32."""
    for chunk in of.chunks:
        out.store(chunk.start, of.widened(stored.load(chunk.start, chunk.width)))


def _copy(of: CacheFormat, stored: Array, out: Array) -> None:
    for chunk in of.chunks:
        out.store(chunk.start, stored.load(chunk.start, chunk.width))


def _first_seen(begin: Value, last: Value, window: Value) -> Value:
    """Returns the first token that the token `last` sees."""
    return (window > 0).select((last + 1 - window).maximum(begin), begin)


@dataclass(frozen=True)
class Operands:
    """Some tokens' keys and values as matrices of fp32."""

    turned: Array
    """Keys, transposed, in panels of `COLUMNS` tokens: [panel][head_dim][COLUMNS]."""
    plain: Array
    """Values, [token][width]."""
    lone: Array
    """Room for one key."""
    width: int
    """A head's elements, rounded up to a multiple of `COLUMNS`."""

    def take(self, of: CacheFormat, key: Array, value: Array, token: Value) -> None:
        """Converts a token's key and value."""
        _widen(of, value, self.plain.at(token * self.width))
        _widen(of, key, self.lone)
        panel = self.turned.at(token // COLUMNS * (of.size * COLUMNS) + token % COLUMNS)
        with token.k.loop(of.size) as n:
            panel.store(n * COLUMNS, self.lone.load(n))


def _width(of: CacheFormat) -> int:
    return -(-of.size // COLUMNS) * COLUMNS


def _emit_scores(
    of: CacheFormat,
    queries: Array,
    operands: Operands,
    tokens: tuple[Value, Value],
    scores: Matrix,
) -> None:
    """Writes the products of `ROWS` queries with the panels of keys of a range of tokens."""
    with scores.array.k.loop(tokens[1], tokens[0], step=COLUMNS) as column:
        panel = Matrix(operands.turned.at(column * of.size), COLUMNS)
        place = Matrix(scores.array.at(column), scores.pitch)
        emit_product(Matrix(queries, of.size), panel, place, of.size)


def _emit_mixed(operands: Operands, scores: Matrix, stop: Value, mixed: Array) -> None:
    """Writes the products of `ROWS` rows of weights and the values of the tokens up to stop."""
    with mixed.k.loop(operands.width, step=COLUMNS) as column:
        side = Matrix(operands.plain.at(column), operands.width)
        emit_product(scores, side, Matrix(mixed.at(column), operands.width), stop)


@lru_cache
def prompt_handler(name: str, size: int, dtype: str) -> int:
    """Returns the handler of a prompt's attention for heads of `size` elements.

    Its arguments: query, scaled, [batch, token, head, head_dim]; key, value, the same with KV
    heads; first, int32 [batch], each sequence's first token that is not padding; limits, fp32 [2],
    window and softcap, each 0 for none. Results: keys, values, [KV row, token, head_dim], copies in
    the cache's layout; fp32 [batch, token, head, head_dim], 0 where there is padding.
    """
    return compiled_handler(name, partial(_emit_prompt, CacheFormat(size, dtype, 16)))


@dataclass(frozen=True)
class Prompt:
    """The shape and the limits of a call of the prompt's handler."""

    tokens: Value
    heads: Value
    kv_heads: Value
    window: Value
    softcap: Value


def _emit_prompt(of: CacheFormat, k: Function, call: Call) -> None:
    asked, kv_heads = call.argument(0), call.argument(1).size(2)
    batch, tokens, heads = (asked.size(n) for n in range(3))
    window, softcap = (call.argument(4).array(F32).load(n) for n in range(2))
    prompt = Prompt(tokens, heads, kv_heads, window.to(I64), softcap)
    begin, end = call.limits(batch * kv_heads)
    room, width = tokens.round_up(COLUMNS), _width(of)
    with k.workspace(
        *((F32, room * of.size), (F32, tokens * width), (F32, of.size), (F32, ROWS * of.size)),
        *((F32, room * ROWS), (F32, ROWS * width), (F32, ROWS)),
    ) as (turned, plain, lone, *work):
        turned.fill(room * of.size)
        plain.fill(tokens * width)
        work[0].fill(k.index(ROWS * of.size))
        operands = Operands(turned, plain, lone, width)
        with k.loop(end, begin) as row:
            _take_head(of, call, prompt, row, operands)
            group = heads // kv_heads
            with k.loop(group) as member:
                place = row // kv_heads * tokens * heads + row % kv_heads * group + member
                first = call.argument(3).array(I32).load(row // kv_heads).to(I64)
                _attend_head(of, call, prompt, (place, first), operands, work)


def _take_head(of: CacheFormat, call: Call, prompt: Prompt, row: Value, operands: Operands) -> None:
    """Copies a KV head's keys and values into the cache's layout, and as operands."""
    key, value = (call.argument(n).array(of.scalar) for n in (1, 2))
    keys, values = (call.result(n).array(of.scalar) for n in (0, 1))
    with row.k.loop(prompt.tokens) as token:
        line = row // prompt.kv_heads * prompt.tokens + token
        begin = (line * prompt.kv_heads + row % prompt.kv_heads) * of.size
        at = (row * prompt.tokens + token) * of.size
        _copy(of, key.at(begin), keys.at(at))
        _copy(of, value.at(begin), values.at(at))
        operands.take(of, key.at(begin), value.at(begin), token)


def _attend_head(
    of: CacheFormat,
    call: Call,
    prompt: Prompt,
    head: tuple[Value, Value],
    operands: Operands,
    work: list[Array],
) -> None:
    """Computes a query head: its place among all heads of all tokens, and its first valid token."""
    (place, first), (queries, weights, mixed, totals) = head, work
    k, room, apart = place.k, prompt.tokens.round_up(COLUMNS), prompt.heads * of.size
    query, out = call.argument(0).array(of.scalar), call.result(2).array(F32)
    query, out = query.at(place * of.size), out.at(place * of.size)
    scores = Matrix(weights, room)
    with k.loop(prompt.tokens, step=ROWS) as top:
        count = (prompt.tokens - top).minimum(ROWS)
        stop = top + count
        with k.loop(count) as n:
            _widen(of, query.at((top + n) * apart), queries.at(n * of.size))
        lowest = _first_seen(first, top, prompt.window).minimum(stop) // COLUMNS * COLUMNS
        _emit_scores(of, queries, operands, (lowest, stop), scores)
        with k.loop(count) as n:
            line, end = weights.at(n * room), top + n + 1
            begin = _first_seen(first, top + n, prompt.window)
            cap(k, line, begin, end, prompt.softcap)
            peak = k.number(F32, MASKED)
            _, total = weigh(k, line, (begin, end), stop.round_up(COLUMNS), peak)
            totals.store(n, total)
        _emit_mixed(operands, scores, stop, mixed)
        with k.loop(count) as n:
            total = totals.load(n)
            share = total.equals(0.0).select(total, k.number(F32, 1.0) / total)
            for chunk in of.chunks:
                value = mixed.load(n * operands.width + chunk.start, chunk.width)
                out.store((top + n) * apart + chunk.start, value * share)


def tokens_at_once(size: int) -> int:
    """Returns how many tokens' keys and values stay in the second cache in fp32, for heads of
    `size` elements: a multiple of `COLUMNS`."""
    return max(4, (1 << 15) // size // COLUMNS) * COLUMNS


@dataclass(frozen=True)
class Chunk:
    """Queries of several tokens, or of several heads, against one KV block.

    A row goes through some of its tokens after the other, as in FlashAttention (Dao 2023, section
    3.1): `out` and `peak` hold the sums and the largest score of the tokens so far.
    """

    format: CacheFormat
    query: Array
    """Scaled, [row, query, head_dim]."""
    query_format: CacheFormat
    key: Array
    """[KV row, token, head_dim]."""
    value: Array
    first: Array
    """int32 or int64 [row / heads], the first valid token in the block."""
    out: Array
    """fp32 [row, query, head_dim], weighted sums of values."""
    peak: Array
    """fp32 [row, query], the largest scores."""
    total: Array
    """fp32 [row, query], sums of weights."""
    num_queries: Value
    tokens: Value
    heads: Value
    """Rows for each element of `first`."""
    group: Value
    """Rows that share keys and values."""
    lead: Value
    """The index of the first query's token, counted from the block's first one."""
    window: Value
    softcap: Value
    step: Value
    """From one query's token to the next; 0 if all are of one token."""


def emit_chunk(of: Chunk, limits: tuple[Value, Value]) -> None:
    """Adds a block to the sums of a range of rows."""
    k, size, (begin, end) = of.lead.k, of.format.size, limits
    width, room = _width(of.format), tokens_at_once(size)
    with k.workspace(
        *((F32, size * room), (F32, room * width), (F32, size), (F32, ROWS * size)),
        *((F32, ROWS * room), (F32, ROWS * width)),
    ) as (turned, plain, lone, *work):
        turned.fill(k.index(size * room))
        plain.fill(k.index(room * width))
        work[0].fill(k.index(ROWS * size))
        operands = Operands(turned, plain, lone, width)
        with k.loop((end + (of.group - 1)) // of.group, begin // of.group) as kept:
            mine = begin.maximum(kept * of.group), end.minimum((kept + 1) * of.group)
            with k.loop(of.tokens, step=room) as base:
                count = (of.tokens - base).minimum(room)
                with k.loop(count) as token:
                    at = (kept * of.tokens + base + token) * size
                    operands.take(of.format, of.key.at(at), of.value.at(at), token)
                with k.loop(mine[1], mine[0]) as row, k.loop(of.num_queries, step=ROWS) as top:
                    _fold_queries(of, (row, top), (base, count), operands, work)


def _fold_queries(
    of: Chunk,
    queries: tuple[Value, Value],
    tokens: tuple[Value, Value],
    operands: Operands,
    work: list[Array],
) -> None:
    """Adds some tokens, the first one and their number, to the sums of up to `ROWS` queries of a
    row, from the query `top` on."""
    (row, top), (base, count), (asked, weights, mixed) = queries, tokens, work
    k, size, room = row.k, of.format.size, tokens_at_once(of.format.size)
    height = (of.num_queries - top).minimum(ROWS)
    begin = of.first.load(row // of.heads).to(I64) - base
    first_token = of.lead + top * of.step - base
    stop = count.minimum(first_token + (height - 1) * of.step + 1)
    lowest = _first_seen(begin, first_token, of.window).maximum(0)
    line = row * of.num_queries + top
    with k.when(lowest < stop):
        with k.loop(height) as n:
            _widen(of.query_format, of.query.at((line + n) * size), asked.at(n * size))
        scores = Matrix(weights, room)
        _emit_scores(of.format, asked, operands, (lowest // COLUMNS * COLUMNS, stop), scores)
        with k.loop(height) as n:
            last, row_weights = first_token + n * of.step, weights.at(n * room)
            low = _first_seen(begin, last, of.window).maximum(0)
            until = count.minimum(last + 1)
            cap(k, row_weights, low, until, of.softcap)
            peak, total = of.peak.load(line + n), of.total.load(line + n)
            after = stop.round_up(COLUMNS)
            highest, summed = weigh(k, row_weights, (low, until), after, peak)
            fade = exp(peak - highest)
            of.peak.store(line + n, highest)
            of.total.store(line + n, k.fma(total, fade, summed))
            for chunk in of.format.chunks:
                place = (line + n) * size + chunk.start
                of.out.store(place, of.out.load(place, chunk.width) * fade)
        _emit_mixed(operands, scores, stop, mixed)
        with k.loop(height) as n:
            for chunk in of.format.chunks:
                place = (line + n) * size + chunk.start
                value = mixed.load(n * operands.width + chunk.start, chunk.width)
                of.out.store(place, of.out.load(place, chunk.width) + value)


@lru_cache
def chunk_handler(name: str, size: int, dtype: str) -> int:
    """Returns the handler of attention to one KV block with several tokens per sequence, for heads
    of `size` elements.

    Its arguments: query, scaled, [row, query, head_dim]; key, value, [KV row, token, head_dim];
    first, int32 [batch]; lead, int32 [1]; limits, fp32 [3]: window, softcap, step; see `Chunk`.
    Results: fp32 [row, query, head_dim], log-sum-exp [row, query].
    """
    return compiled_handler(name, partial(_emit_chunk_call, CacheFormat(size, dtype, 16)))


def _emit_chunk_call(of: CacheFormat, k: Function, call: Call) -> None:
    query, key, value, first, lead, limits = (call.argument(n) for n in range(6))
    rows, queries, out, lse = query.size(0), query.size(1), call.result(0), call.result(1)
    begin, end = call.limits(rows)
    window, softcap, step = (limits.array(F32).load(n) for n in range(3))
    with k.workspace((F32, (end - begin) * queries)) as (total,):
        own = Chunk(
            format=of,
            query=query.array(of.scalar),
            query_format=of,
            key=key.array(of.scalar),
            value=value.array(of.scalar),
            first=first.array(I32),
            out=out.array(F32),
            peak=lse.array(F32),
            total=total.at(k.index(0) - begin * queries),
            num_queries=queries,
            tokens=key.size(1),
            heads=rows // first.size(0),
            group=rows // key.size(0),
            lead=lead.array(I32).load(0).to(I64),
            window=window.to(I64),
            softcap=softcap,
            step=step.to(I64),
        )
        count = (end - begin) * queries
        total.fill(count)
        own.peak.at(begin * queries).fill(count, MASKED)
        own.out.at(begin * queries * of.size).fill(count * of.size)
        emit_chunk(own, (begin, end))
        with k.loop(end * queries, begin * queries) as line:
            summed = own.total.load(line)
            with k.when(summed.differs(0.0)):
                log: Value = k.call("llvm.log.f32", F32, summed)
                own.peak.store(line, own.peak.load(line) + log)
                share = k.number(F32, 1.0) / summed
                for chunk in of.chunks:
                    place = line * of.size + chunk.start
                    own.out.store(place, own.out.load(place, chunk.width) * share)


@lru_cache
def fold_together_kernel(size: int, dtype: str) -> HostKernel:
    """Returns the kernel of decode attention in which many heads share keys and values: some heads,
    a line, are its rows.

    Its arguments: query, scaled, fp32 [line, head, head_dim]; key, value, [line / group, token,
    head_dim]; first, int64 [line]; peak, total, fp32 [line, head]; out, fp32 [line, head,
    head_dim], see `decode_attention.Running`; heads of a line; the block's tokens; the end of its
    valid ones; lines that share keys and values; softcap, fp32, 0 for none.
    """
    of = CacheFormat(size, dtype, 16)
    return HostKernel(f"flexgen_jax_fold_together_{size}_{dtype}", partial(_fold_lines, of))


def _fold_lines(of: CacheFormat, k: Function, call: Arguments, limits: tuple[Value, Value]) -> None:
    heads, tokens, stop, lines = (call.index(n) for n in range(7, 11))
    own = Chunk(
        format=of,
        query=call.array(0, F32),
        query_format=CacheFormat(of.size, "float32", 16),
        key=call.array(1, of.scalar),
        value=call.array(2, of.scalar),
        first=call.array(3, I64),
        peak=call.array(4, F32),
        total=call.array(5, F32),
        out=call.array(6, F32),
        num_queries=heads,
        tokens=tokens,
        heads=k.index(1),
        group=lines,
        lead=stop - 1,
        window=k.index(0),
        softcap=call.single(11),
        step=k.index(0),
    )
    emit_chunk(own, limits)
