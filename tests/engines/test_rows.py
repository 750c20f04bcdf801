"""Rows come from an engine as numpy in host memory, whatever the model gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skydraft.engines.toy import ToyEngine
from tests import toys

from ..later import later

torch = later("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_of_torch_come_as_numpy_with_every_bit(dtype: str) -> None:
    last, named = toys.tables(1)
    kind = getattr(torch, dtype)

    class Tensors(ToyEngine):
        def forward(self, feeds: Any, *, want_logits: bool) -> Any:
            rows_of_feeds = super().forward(feeds, want_logits=want_logits)
            with torch.inference_mode():
                return [torch.from_numpy(rows).to(kind) for rows in rows_of_feeds] if want_logits else rows_of_feeds

    with Tensors(toys.VOCAB, last, **named) as engine:
        rows = engine.open([1, 2]).extend([2, 5])
    expected = torch.from_numpy(ToyEngine(toys.VOCAB, last, **named).open([1, 2]).extend([2, 5])).to(kind).float()
    assert type(rows) is np.ndarray and rows.dtype == np.float32
    assert np.array_equal(rows, expected.numpy())
