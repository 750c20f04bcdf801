"""A toy whose KV depends on how it was fed, so that a wrong reuse of KV changes tokens."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Rows

PART = 4


class Partial(ToyEngine):
    """Its KV depends on whether a token came in a part of a prompt, and where in it, as that of a real model does.

    An entry of its cache is (token, position + 1000 for each row before it in its forward).
    """

    max_batch_rows = PART
    max_sequences = 3
    num_rows = 0

    def forward(self, feeds: Any, *, want_logits: bool) -> list[Rows]:
        rows = super().forward(feeds, want_logits=want_logits)
        for sequence, token_ids in feeds:
            self.num_rows += len(token_ids)
            start = len(sequence.slot) - len(token_ids)
            for index in range(len(token_ids)):
                token_id, position = sequence.slot[start + index]
                sequence.slot[start + index] = token_id, position + 7000 * index + (0 if want_logits else 7)
        return rows

    def _row(self, cache: Seq[tuple[int, int]]) -> Any:
        mixed = sum(position * (index + 3) for index, (_, position) in enumerate(cache)) % 1009
        return super()._row(cache) + np.sin(np.arange(self.vocab.size) * mixed).astype(np.float32)  # type: ignore[arg-type]
