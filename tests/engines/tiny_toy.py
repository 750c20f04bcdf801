"""A toy of a few tokens, whole or broken on purpose."""

from typing import Any

import numpy as np

from skydraft.engines.toy import ToyEngine, character_vocab

VOCAB = character_vocab("我你他在说，。ab")
SIZE = VOCAB.size


def toy(kind: type[ToyEngine] = ToyEngine, context_len: int = 256, **options: Any) -> Any:
    rng = np.random.default_rng(4)
    tables = [rng.normal(0, 2, (rows, SIZE)).astype(np.float32) for rows in (SIZE, SIZE, 7)]
    return kind(VOCAB, tables[0], by_previous=tables[1], by_position=tables[2], context_len=context_len, **options)
