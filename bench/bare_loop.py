"""The plainest greedy loop over llama.cpp: one token, one llama_decode, one argmax. Shares no code with the engine.

The tests compare the tokens of `edge` with it (F14).
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np

_TYPE_F16, _TYPE_BF16 = 1, 30
_CONTEXT = 4096
_QUIET = lib.llama_log_callback(lambda level, text, data: None)  # for as long as llama.cpp may call it


class BareLoop:
    """A model and a context with the engine's cache types, driven by hand."""

    def __init__(self, path: Path, num_threads: int) -> None:
        lib.llama_log_set(_QUIET, ctypes.c_void_p(0))
        self._model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_outputs_max = _CONTEXT, 512, 512, 8
        params.n_threads = params.n_threads_batch = num_threads
        params.flash_attn_type, params.type_k, params.type_v = 1, _TYPE_F16, _TYPE_BF16
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._num_rows = lib.llama_vocab_n_tokens(self._vocab)
        self._batch = lib.llama_batch_init(512, 0, 1)

    def _decode(self, token_ids: Sequence[int], position: int, *, want_logits: bool) -> None:
        batch = self._batch
        for row, token_id in enumerate(token_ids):
            batch.token[row], batch.pos[row] = token_id, position + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = want_logits
        batch.n_tokens = len(token_ids)
        assert lib.llama_decode(self._context, batch) == 0

    def generate(self, prompt: Sequence[int], num_tokens: int, cut: int) -> list[int]:
        """Greedy tokens up to an end token.

        The prompt is fed in two parts, `cut` where the chat template's own part ends, as the engine does: at once it
        would give other bits.
        """
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        for start, end in ((0, cut), (cut, len(prompt) - 1)):
            if start < end:
                self._decode(prompt[start:end], start, want_logits=False)
        token_ids: list[int] = []
        last = prompt[-1]
        while len(token_ids) < num_tokens:
            self._decode([last], len(prompt) - 1 + len(token_ids), want_logits=True)
            pointer = lib.llama_get_logits(self._context)
            last = int(np.ctypeslib.as_array(pointer, shape=(self._num_rows,)).argmax())
            token_ids.append(last)
            if lib.llama_vocab_is_eog(self._vocab, last):
                break
        return token_ids

    def close(self) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)
        lib.llama_model_free(self._model)
