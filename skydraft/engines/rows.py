"""Rows of logits, numpy or torch: they stay where the engine has them."""

from __future__ import annotations

from typing import Any, TypeAlias

import array_api_compat
import numpy as np
import numpy.typing as npt

# [num_rows, vocab.size], numpy or torch: rows stay where the engine has them.
Rows: TypeAlias = Any


def at_least_float32(row: Rows) -> Rows:
    """The row itself, or its float32 copy where it has 16 bits: exact, and what transformers computes on."""
    if isinstance(row, np.ndarray):
        return row.astype(np.float32) if row.itemsize < 4 else row
    return row.float() if row.element_size() < 4 else row


def namespace_of(rows: Rows) -> Any:
    """The functions of the array API standard for these rows.

    numpy has them itself from 2.1 on; the wrappers of array_api_compat add a sixth of a second to each start.
    """
    if isinstance(rows, np.ndarray) and hasattr(np, "astype"):
        return np
    return array_api_compat.array_namespace(rows)


def is_on_host(rows: Rows) -> bool:
    """Whether numpy can read the rows where they lie."""
    return isinstance(rows, np.ndarray) or rows.device.type == "cpu"


def on_host(array: Any) -> npt.NDArray[Any]:
    """The array in host memory, numpy, of at least 32 bits; not a copy where it lies there already."""
    return array if isinstance(array, np.ndarray) else np.asarray(at_least_float32(array).detach().cpu().numpy())
