"""The file of an adapter: low-rank changes of some matrices of one model, and what they were made from.

A safetensors file: for each matrix NAME of the base `NAME.lora_A` [rank, in] and `NAME.lora_B` [out, rank] in float32;
the change is scale · B · A. Its metadata says of which base it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skydraft.errors import MissingDependency, OptionError, RecordsError

Matrix = npt.NDArray[np.float32]


class AdapterCard(BaseModel):
    """Where an adapter comes from: names and fingerprints, and what was measured when it was trained."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_number: int = Field(default=1, ge=1, le=1, alias="schema")
    base: str
    base_name: str
    vocab: str
    target: str
    scale: float = Field(gt=0)
    num_trained: int
    trained_on: tuple[str, ...] = ()  # digests of the prompts, see dataset.prompt_digest
    held_out: tuple[float, float]
    guard: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank pairs (A, B) by the name of the matrix that they change, and their card."""

    card: AdapterCard
    pairs: Mapping[str, tuple[Matrix, Matrix]]

    @property
    def fingerprint(self) -> str:
        """32 hex digits of what it changes."""
        total = hashlib.sha256(f"{self.card.base} {self.card.scale}".encode())
        for name in sorted(self.pairs):
            total.update(name.encode())
            for matrix in self.pairs[name]:
                total.update(np.ascontiguousarray(matrix).tobytes())
        return total.hexdigest()[:32]

    def change(self, name: str) -> Matrix:
        """What is added to a matrix, [out, in]."""
        low, high = self.pairs[name]
        return np.asarray(self.card.scale * (high @ low), np.float32)

    def check_base(self, fingerprint: str, name: str) -> None:
        """Raise OptionError unless it was trained for these weights."""
        if fingerprint != self.card.base:
            raise OptionError(
                f"This adapter was trained for {self.card.base_name} ({self.card.base[:8]}), not for {name} "
                f"({fingerprint[:8]}).",
                hint="Name the model that it was trained for, or train another.",
            )


def write_adapter(path: Path, adapter: Adapter) -> None:
    """Write it, whole or not at all, readable by the user alone. Raises OptionError where that is not possible."""
    save = _library().save
    tensors = {
        f"{name}.lora_{side}": np.ascontiguousarray(matrix, np.float32)
        for name, pair in adapter.pairs.items()
        for side, matrix in zip("AB", pair, strict=True)
    }
    data = save(tensors, {"skydraft-adapter": adapter.card.model_dump_json(by_alias=True)})
    write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that only the user can read; it is there whole or not at all. Raises OptionError."""
    partial = path.with_name(path.name + ".partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True) if partial.parent.is_dir() else None
        raise OptionError(f"{path} cannot be written: {error.strerror}.", hint="Choose another file.") from error


def read_adapter(path: Path) -> Adapter:
    """An adapter from its file. Raises RecordsError for what is none, OptionError for a file that cannot be read."""
    library = _library()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.", hint="Check its name.") from error
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        card = AdapterCard.model_validate_json(header["__metadata__"]["skydraft-adapter"])
        tensors = library.load(data)
        names = sorted({name.rpartition(".")[0] for name in tensors})
        pairs = {name: _checked(tensors, name) for name in names}
        if not pairs or len(tensors) != 2 * len(pairs):
            raise ValueError("it changes nothing")
    except (ValueError, KeyError, TypeError, ValidationError, library.SafetensorError) as error:
        raise RecordsError(
            f"{path} is not an adapter of this version, or it is damaged.", hint="Make one with: skydraft learn train."
        ) from error
    return Adapter(card, pairs)


def _checked(tensors: Mapping[str, Any], name: str) -> tuple[Matrix, Matrix]:
    low, high = tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]
    fits = low.ndim == high.ndim == 2 and len(low) == high.shape[1] and low.dtype == high.dtype == np.float32
    if not fits or not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"{name} is no low-rank change")
    return low, high


def _library() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise MissingDependency(
            "Adapters need safetensors, which is not installed.", hint="Run: pip install 'skydraft[learn]'."
        ) from error
    safetensors.numpy.SafetensorError = safetensors.SafetensorError  # type: ignore[attr-defined]
    return safetensors.numpy
