"""Rows of logits as everything behind the engines reads them: numpy, in host memory, of at least 32 bits."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = Any  # [num_rows, vocab.size]; `Model.forward` may give tensors of torch, on any device


def on_host(rows: Rows) -> npt.NDArray[Any]:
    """Rows of numpy or torch in host memory, those of 16 bits as float32: exact, and what transformers computes on.

    No copy of what is there already.
    """
    if isinstance(rows, np.ndarray):
        return rows.astype(np.float32) if rows.itemsize < 4 else rows
    wide = rows.float() if rows.element_size() < 4 else rows
    return np.asarray(wide.detach().cpu().numpy())
