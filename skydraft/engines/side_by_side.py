"""Rows of several sequences in one forward of a transformers model, side by side and without padding.

Matrix products see all rows at once, so that weights are read once; attention runs for each sequence in the model's own
implementation, with the keys and the mask that a forward of that sequence alone would have. So logits have the bits of
one by one for as long as matrix products of so many rows do (`Engine.invariant_rows`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

_NAME = "skydraft_side_by_side"  # of an attention and of its masks, as transformers knows them


@dataclass(frozen=True)
class Stretch:
    """What one sequence has in a forward: its cache, how many tokens that holds, and how many rows are new."""

    cache: Any
    length: int
    num_rows: int


class SideBySide:
    """What the model takes for a cache: it puts the keys of each part into the cache of that part.

    `attention` is the name of the one that the model has by itself.
    """

    def __init__(self, parts: Seq[Stretch], attention: str) -> None:
        self._parts = parts
        self._sizes = [part.num_rows for part in parts]
        self._attention = attention
        self._held: list[tuple[Any, Any]] | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing lies before all parts; where each begins, its positions say."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As above."""
        return 0

    def get_mask_sizes(self, num_rows: int, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, offset) of a mask, which nobody looks at: `masks` makes one for each part."""
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
        return [
            made(**kwargs | {
                "q_length": part.num_rows, "q_offset": part.length, "kv_length": part.length + part.num_rows,
            })
            for part in self._parts
        ]  # fmt: skip

    def attend(self, module: Any, query: Any, masks: list[Any], **kwargs: Any) -> list[Any]:
        """Attention of each part's rows, one after another: [1, num_rows, heads, head_dim] each."""
        held, self._held = self._held, None
        if held is None:
            raise NotImplementedError(f"{type(module).__name__} keeps no keys of its own")
        inner = _attention_of(self._attention, module)
        rows = zip(query.split(self._sizes, -2), held, masks, strict=True)
        return [inner(module, mine, key, value, mask, **kwargs)[0] for mine, (key, value), mask in rows]


_under_way: ContextVar[SideBySide] = ContextVar("side by side")


@contextmanager
def side_by_side(parts: Seq[Stretch], config: Any) -> Iterator[SideBySide]:
    """A cache for one forward of all parts. `config` is that of the decoder, whose attention is another meanwhile."""
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


def _attention_of(name: str, module: Any) -> Any:
    """The attention that a model would have used."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == "eager":  # of which each model has its own
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]
