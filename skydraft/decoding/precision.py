"""Rows come in the precision of the model; what is computed from them needs at least float32."""

from __future__ import annotations

from typing import Any

import numpy as np


def at_least_float32(row: Any) -> Any:
    """`row` itself, or its float32 copy where it has 16 bits: exact, and what transformers computes on."""
    if isinstance(row, np.ndarray):
        return row.astype(np.float32) if row.itemsize < 4 else row
    return row.float() if row.element_size() < 4 else row
