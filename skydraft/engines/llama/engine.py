"""GGUF models in llama.cpp."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from skydraft.config import num_cores
from skydraft.engines.base import Engine, Feeds, Sequence
from skydraft.engines.llama.library import load_library, rope_depends, without_matrices
from skydraft.engines.llama.weights import Weights, interrupts_kept
from skydraft.engines.options import EngineOptions
from skydraft.engines.probe import MAX_PROBED_ROWS, cpu_model, profile_of
from skydraft.engines.row_costs import NOT_PROBED, Pass, RowCosts
from skydraft.engines.slots import Slots
from skydraft.engines.vocab import Rows, TokenIds
from skydraft.errors import EngineError, or_else

_OUTPUT_ROWS = 16  # rows with logits of a forward, at least; a row is 0.6 MB
_PREFILL_ROWS = 128  # buffers for 512 take 0.1 GB more a pair, and are no faster on a CPU
_FLASH_ATTENTION_ON = 1
_NOTED_LEN = 512  # tokens up to which times are compared with the profile
_LEAST_LEN, _AHEAD = 256, 64  # tokens: the shortest growing place, and its room beyond the prompt
_TYPE_F16, _TYPE_BF16 = 1, 30


@dataclass(eq=False, slots=True)
class Cells:
    """A sequence of llama.cpp: its context, its number in it, and its room in tokens."""

    context: Any
    memory: Any
    number: int
    length: int


class _Stretch(NamedTuple):
    """Rows of one sequence in a forward, from position `length` on, and additional rows to be thrown away."""

    place: Cells
    length: int
    token_ids: Seq[int] | TokenIds
    feed: int = -1  # which feed it is a part of; none if all rows are additional
    num_padding: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + self.num_padding

    def of(self, num_rows: int) -> _Stretch:
        """Pad to `num_rows`, as far as the place has room."""
        return self._replace(num_padding=max(min(num_rows, self.place.length - self.length) - len(self.token_ids), 0))


class LlamaCppEngine(Engine):
    """One GGUF model in llama.cpp. All sequences share one context, and one forward can feed them all. If memory grows
    with the texts, each sequence has its own context, replaced by one of twice the length. A slot is a `Cells`.

    The KV cache holds K in float16 and V in bfloat16. With equal types llama.cpp splits a single row's keys over
    threads from 512 cells on, so that one row and two rows at a time give other bits. With these types it never does.
    """

    def __init__(
        self, path: Path, options: EngineOptions, *, name: str = "", base: LlamaCppEngine | None = None,
        adapter: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name or path.stem)
        self._lib = load_library()
        self.max_batch_rows = _PREFILL_ROWS
        # At least a row of each sequence. On a GPU more rows cost little (NOTES.md), so it adds rows for drafts.
        rows = options.max_sequences + (2 * _OUTPUT_ROWS if options.gpu_layers else 0)
        self.max_output_rows = min(max(_OUTPUT_ROWS, rows), self.max_batch_rows)
        self.path, self._options = path, options
        self._num_threads, self.on_gpu = options.num_threads or num_cores(), bool(options.gpu_layers)
        weights = base._weights if base else Weights(self._lib, path, options.gpu_layers, self.name)
        self._weights: Weights = weights.lend()
        self._model, self.vocab, self.fingerprint = self._weights.model, self._weights.vocab, self._weights.fingerprint
        trained = self._lib.model_n_ctx_train(self._model)
        self.context_len = min(options.context_len, trained)
        if trained < options.context_len:
            options.notify(f"{self.name} was trained with {trained} tokens, so its context is not longer.")
        self.max_sequences, self.can_copy = options.max_sequences, options.max_sequences > 1
        self._grows = bool(options.total_len) and not rope_depends(self._lib, path)
        self._adapter: Any = None
        self._places: list[Cells] = []
        with or_else(self._weights.give_back):
            if adapter:
                self._adapter, self.fingerprint = self._weights.load_adapter(adapter)
            if not self._grows:  # one place more holds the beginning of prompts
                self._open_places(self.context_len, self.max_sequences + self.can_copy)
        self._num_rows_padded = self._lib.vocab_n_tokens(self._lib.model_get_vocab(self._model))
        self._batch = self._lib.batch_init(self.max_batch_rows, 0, 1)
        how = options.max_sequences, self.context_len, options.total_len, options.wait_s
        self.slots = slots = (base.slots if base else None) or Slots(self.name, *how)
        slots.engines.add(self)
        self.adapters.wait_s = options.wait_s
        self._costs = RowCosts(NOT_PROBED, self.name)
        self.profile = base.profile if base else profile_of(self, self._profile_key(options), options)
        if base:  # an adapter changes each forward a little, so exactness is tested again in use
            self.probed_len = 0
        self._costs = RowCosts(self.profile, self.name)
        self._lib.model_desc(self._model, kind := ctypes.create_string_buffer(128), 128)
        more = "; more with `skydraft models quantize`, perhaps" if self.invariant_rows < MAX_PROBED_ROWS else ""
        self.about_rows = f"{kind.value.decode()} checks {self.invariant_rows} tokens at once to the bit{more}"

    def open_adapted(self, adapter: Path) -> LlamaCppEngine:
        return LlamaCppEngine(self.path, self._options, name=self.name, base=self, adapter=adapter)

    def _open_places(self, length: int, num: int) -> list[Cells]:
        """Open a context; returns its places."""
        params = self._lib.context_default_params()
        params.n_seq_max = num
        params.n_ctx = length * num
        params.n_batch = params.n_ubatch = self.max_batch_rows
        # The default reserves 300 MB, logits for whole prompts. Less than a row for each sequence crashes the process.
        params.n_outputs_max = max(self.max_output_rows, params.n_seq_max)
        params.n_threads = params.n_threads_batch = self._num_threads
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.type_k, params.type_v = _TYPE_F16, _TYPE_BF16
        with interrupts_kept():
            context = self._lib.init_from_model(self._model, params)
        if not context:
            hint = "Lower --context."
            raise EngineError(f"llama.cpp cannot open a context of {params.n_ctx} tokens for {self.name}.", hint=hint)
        if self._adapter:  # each context has one adapter at a time
            self._lib.set_adapters_lora(context, (ctypes.c_void_p * 1)(self._adapter), 1, (ctypes.c_float * 1)(1.0))
        places = [Cells(context, self._lib.get_memory(context), number, length) for number in range(num)]
        self._places += places
        return places

    def _profile_key(self, options: EngineOptions) -> str:
        system = (self._lib.name, cpu_model(), self._lib.print_system_info().decode())
        return "|".join(map(str, (self._weights.fingerprint, *system, self._num_threads, options.gpu_layers)))

    def vocabulary_file(self) -> bytes:
        return without_matrices(self._lib, self.path)

    @property
    def forward_ms(self) -> tuple[float, ...]:
        return self._costs.forward_ms

    @property
    def num_cells(self) -> int:
        return sum(place.length for place in self._places) if self._grows else 0

    def allocate(self, num_tokens: int) -> Cells:
        free = [place for place in self._places if place not in self.prefixes.slots]
        if self._grows:
            for place in free:  # left open by an interrupt
                self._close_place(place)
            length = min(max(_LEAST_LEN, 1 << (num_tokens + _AHEAD).bit_length()), self.context_len)
            return self._open_places(length, 1)[0]
        if not free:
            raise EngineError(f"All sequences of {self.name} are in use.", hint="Close one first.")
        self._empty(free[0])  # an interrupt may have left tokens
        return free[0]

    def _empty(self, place: Cells) -> None:
        self._lib.memory_seq_rm(place.memory, place.number, -1, -1)

    def _close_place(self, place: Cells) -> None:
        self._places.remove(place)
        self._lib.free(place.context)

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        old, new = sequence.slot, self.allocate(num_tokens)
        self._carry(old, new)
        sequence.slot = new
        self._close_place(old)
        self.prefixes.make_room(self, 0)

    def forward(self, feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        for sequence, token_ids in feeds:
            if (length := sequence.length + len(token_ids)) > sequence.slot.length:
                self._grow(sequence, length)
        if not self._grows:
            return self._compute(feeds, want_logits=want_logits)
        return [rows for each in feeds for rows in self._compute([each], want_logits=want_logits)]

    def _passes(self, feeds: Feeds) -> list[Pass]:
        return self._costs.passes([len(token_ids) for _, token_ids in feeds])

    def shapes(self, feeds: Feeds) -> list[Hashable]:
        length, parts = max(sequence.length for sequence, _ in feeds), [[each] for each in feeds]
        passes = [each for part in (parts if self._grows else [feeds]) for each in self._passes(part)]
        wanted = [(len(each.feeds), each.num_rows) for each in passes]
        return [(length.bit_length(), num, num_rows, self._costs.padded(num * num_rows)) for num, num_rows in wanted]

    def _compute(self, feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        rows: list[list[Rows]] = [[] for _ in feeds]
        passes, done = self._passes(feeds), 0
        for numbers, num_rows in passes:
            fed = [(i, *feeds[i]) for i in numbers]
            stretches = [_Stretch(seq.slot, seq.length + done, ids[done : done + num_rows], i) for i, seq, ids in fed]
            stretches = self._padded(stretches, num_rows) if want_logits else stretches
            # llama.cpp computes sequences with consecutive numbers together.
            stretches.sort(key=attrgetter("place.number"))
            logits, at = self._decode(stretches, want_logits=want_logits), 0
            for stretch in stretches:
                if stretch.feed >= 0:
                    # Valid until the next forward of the context.
                    part = logits[at : at + len(stretch.token_ids)]
                    rows[stretch.feed].append(part.copy() if self._grows or len(passes) > 1 else part)
                at += stretch.num_rows
            done += num_rows
        return [parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in rows] if want_logits else []

    def _padded(self, stretches: list[_Stretch], num_rows: int) -> list[_Stretch]:
        """Add rows that make the forward cheaper: to each sequence, or from places that it does not feed."""
        wanted = self._costs.padded(len(stretches) * num_rows)
        num_more, rest = 0, wanted % len(stretches)
        if not rest:
            num_rows = wanted // len(stretches)
        elif wanted % num_rows == 0:
            num_more = wanted // num_rows - len(stretches)
        if num_more:
            fed = [stretch.place for stretch in stretches]
            others = [place for place in self._places if place.context is fed[0].context and place not in fed]
            others.sort(key=lambda place: abs(place.number - fed[0].number))  # so that numbers are nearly consecutive
            stretches = stretches + [_Stretch(place, self._kv_length(place), ()) for place in others[:num_more]]
        return [stretch.of(num_rows) for stretch in stretches]

    def _decode(self, stretches: list[_Stretch], *, want_logits: bool) -> Rows:
        """Run one forward; returns logits [rows, vocab], padding included, or [rows, 0] without `want_logits`."""
        batch, num_rows, longest = self._batch, 0, 0
        for place, length, token_ids, _, num_padding in stretches:
            longest = max(longest, length)
            for position, token_id in enumerate((*token_ids, *(0,) * num_padding), length):
                batch.token[num_rows] = token_id
                batch.pos[num_rows] = position
                batch.n_seq_id[num_rows] = 1
                batch.seq_id[num_rows][0] = place.number
                batch.logits[num_rows] = want_logits
                num_rows += 1
        batch.n_tokens, context, began = num_rows, stretches[0].place.context, time.perf_counter()
        try:
            if status := self._lib.decode(context, batch):
                raise EngineError(f"llama.cpp refused a forward of {num_rows} rows (status {status}).")
        finally:
            for place, length, token_ids, _, num_padding in stretches:
                if num_padding:
                    self._lib.memory_seq_rm(place.memory, place.number, length + len(token_ids), -1)
        if not want_logits:
            return np.empty((num_rows, 0), np.float32)
        pointer = self._lib.get_logits(context)
        if longest < _NOTED_LEN:
            self._costs.note(num_rows, (time.perf_counter() - began) * 1e3)
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self._num_rows_padded))[:, : self.vocab.size]

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:
        if self.kv_length(source) <= target.slot.length:
            self._carry(source.slot, target.slot)
        else:  # llama.cpp can only copy a whole sequence
            between = Sequence(self, self._open_places(source.slot.length, 1)[0])
            try:
                self._carry(source.slot, between.slot)
                self.roll_back(between, length)
                self._carry(between.slot, target.slot)
            finally:
                self._close_place(between.slot)
        self.roll_back(target, length)

    def _carry(self, source: Cells, target: Cells) -> None:
        """Copy all KV of one place to another. llama.cpp's own copy between streams needs whole buffers."""
        kv = np.empty(size := self._lib.state_seq_get_size(source.context, source.number), np.uint8)
        saved = self._lib.state_seq_get_data(source.context, kv.ctypes.data, size, source.number)
        if self._lib.state_seq_set_data(target.context, kv.ctypes.data, saved, target.number) != size:
            raise EngineError(f"llama.cpp cannot copy the KV of {self.name}.")

    def roll_back(self, sequence: Sequence, length: int) -> None:
        if not self._lib.memory_seq_rm(sequence.slot.memory, sequence.slot.number, length, -1):
            hint = "Use a model without recurrent layers."
            raise EngineError(f"The KV cache of {self.name} cannot be rolled back to {length}.", hint=hint)

    def release(self, sequence: Sequence) -> None:
        (self._close_place if self._grows else self._empty)(sequence.slot)

    def kv_length(self, sequence: Sequence) -> int:
        return self._kv_length(sequence.slot)

    def _kv_length(self, place: Cells) -> int:
        return int(self._lib.memory_seq_pos_max(place.memory, place.number)) + 1

    def free(self) -> None:
        self._lib.batch_free(self._batch)
        for context in dict.fromkeys(place.context for place in self._places):
            self._lib.free(context)
        self._weights.give_back()
