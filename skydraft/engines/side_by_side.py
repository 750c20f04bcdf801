"""Rows of several sequences in one forward of a transformers model, side by side and without padding.

Matrix products see all rows at once, so weights are read once. Attention runs for each sequence alone, in the model's
own implementation, with the keys and the mask that a forward of that sequence would have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

_NAME = "skydraft_side_by_side"  # of an attention and of its masks in transformers


class Stretch(NamedTuple):
    """The part of one sequence in a forward: its cache, the tokens in that, and the number of new rows."""

    cache: Any
    length: int
    num_rows: int


class SideBySide:
    """The cache given to the model: it puts the keys of each part into the cache of that part. `attention` names the
    model's own attention."""

    def __init__(self, parts: Seq[Stretch], attention: str) -> None:
        self._parts, self._attention = parts, attention
        self._sizes = [part.num_rows for part in parts]
        self._held: list[tuple[Any, Any]] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: no tokens precede all parts. Positions say where each part begins."""
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, num_rows: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, offset) of a mask that is not used: `masks` makes one for each part."""
        return num_rows, 0

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Keep new keys and values [1, heads, rows, head_dim] of a layer; returns them, since `attend` has the rest."""
        new = zip(self._parts, keys.split(self._sizes, -2), values.split(self._sizes, -2), strict=True)
        self._held = [part.cache.update(key, value, layer_idx, *args, **kwargs) for part, key, value in new]
        return keys, values

    def masks(self, **kwargs: Any) -> list[Any]:
        """The mask of each part, as the model would have it made for that part alone."""
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        made = ALL_MASK_ATTENTION_FUNCTIONS[self._attention]
        places = [(part.num_rows, part.length) for part in self._parts]
        return [made(**kwargs | {"q_length": num, "q_offset": at, "kv_length": at + num}) for num, at in places]

    def attend(self, module: Any, query: Any, masks: list[Any], **kwargs: Any) -> list[Any]:
        """Attention of each part's rows, one after another: [1, num_rows, heads, head_dim] each."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        own = sys.modules[type(module).__module__]  # "eager" has no entry: each model has its own
        inner = own.eager_attention_forward if self._attention == "eager" else ALL_ATTENTION_FUNCTIONS[self._attention]
        held, self._held = self._held, []  # a layer without keys of its own fails here
        rows = zip(query.split(self._sizes, -2), held, masks, strict=True)
        return [inner(module, mine, key, value, mask, **kwargs)[0] for mine, (key, value), mask in rows]


_under_way: ContextVar[SideBySide] = ContextVar("side by side")


@contextmanager
def side_by_side(parts: Seq[Stretch], config: Any) -> Iterator[SideBySide]:
    """A cache for one forward of all parts. Replaces the attention in the decoder's `config` meanwhile."""
    _register()
    attention = config._attn_implementation
    token = _under_way.set(SideBySide(parts, attention))
    config._attn_implementation = _NAME
    try:
        yield _under_way.get()
    finally:
        config._attn_implementation = attention
        _under_way.reset(token)


@cache
def _register() -> None:
    import torch
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
        return torch.cat(_under_way.get().attend(module, query, attention_mask, **kwargs), 1), None

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda **kwargs: _under_way.get().masks(**kwargs))
