"""Adapters: low-rank changes of some matrices of one model. Their files, and draft models that are merged with one.

The file is a safetensors file: for each matrix NAME of the base `NAME.lora_A` [rank, in] and `NAME.lora_B` [out, rank]
in float32; the change is scale · B · A. Its metadata names the base. The merged model is as fast as its base; its
fingerprint names base and adapter.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skydraft.characters import from_json
from skydraft.engines.base import Engine
from skydraft.errors import BrokenModel, ModelFilesError, OptionError, RecordsError, importing
from skydraft.files import read_file, write_whole
from skydraft.models.adapted import Applied, applied, changing, is_whole, merged_dir, publish, set_applied

Matrix = npt.NDArray[np.float32]
Load: TypeAlias = Callable[[str], Engine]


class AdapterCard(BaseModel):
    """Names the models and the prompts that an adapter was made from, and what was measured when it was trained."""

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
    """Low-rank pairs (A, B) by the name of the matrix that they change, and their card.

    `file` is the file that it was read from, or "".
    """

    card: AdapterCard
    pairs: Mapping[str, tuple[Matrix, Matrix]]
    file: str = ""

    @property
    def fingerprint(self) -> str:
        """32 hex digits that name its base and its matrices."""
        total = hashlib.sha256(f"{self.card.base} {self.card.scale}".encode())
        for name in sorted(self.pairs):
            total.update(name.encode())
            for matrix in self.pairs[name]:
                total.update(np.ascontiguousarray(matrix).tobytes())
        return total.hexdigest()[:32]

    def change(self, name: str) -> Matrix:
        """Return what the adapter adds to a matrix, [out, in]."""
        low, high = self.pairs[name]
        return np.asarray(self.card.scale * (high @ low), np.float32)


def file_of(engine: Engine) -> Path:
    """Return the file or folder that an engine was opened from. Raises OptionError where there is none."""
    path = getattr(engine, "path", None)
    if not isinstance(path, Path):
        raise OptionError(
            f"{engine.name} has no weights that can be trained.", hint="Name a .gguf file or a checkpoint."
        )
    return path


def write_adapter(path: Path, adapter: Adapter) -> None:
    """Write an adapter's file, which only the user can read. Raises OptionError."""
    save = _library().save
    tensors = {
        f"{name}.lora_{side}": np.ascontiguousarray(matrix, np.float32)
        for name, pair in adapter.pairs.items()
        for side, matrix in zip("AB", pair, strict=True)
    }
    data = save(tensors, {"skydraft-adapter": adapter.card.model_dump_json(by_alias=True)})
    write_private(path, data)


def write_private(path: Path, data: bytes) -> None:
    """Write a whole file that only the user can read. Raises OptionError."""
    try:
        write_whole(path, data, 0o600)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}.", hint="Choose another file.") from error


def read_adapter(path: Path) -> Adapter:
    """Read an adapter from its file. Raises RecordsError if it holds none, OptionError if it cannot be read."""
    try:
        data = read_file(path)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.", hint="Check its name.") from error
    library = _library()
    try:
        header = from_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
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
    return Adapter(card, pairs, str(path.absolute()))


def _checked(tensors: Mapping[str, Any], name: str) -> tuple[Matrix, Matrix]:
    low, high = tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]
    fits = low.ndim == high.ndim == 2 and len(low) == high.shape[1] and low.dtype == high.dtype == np.float32
    if not fits or not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"{name} is no low-rank change")
    return low, high


def _library() -> Any:
    with importing("Adapters need", "learn"):
        import safetensors.numpy
    safetensors.numpy.SafetensorError = safetensors.SafetensorError  # type: ignore[attr-defined]
    return safetensors.numpy


def open_learned(name: str, learned: Path | Applied, load: Load, cache: Path) -> Engine:
    """Open the draft model `name` with an adapter's file, or with what was applied to it; its name says both.

    Raises ModelFilesError where what was applied is gone.
    """
    if isinstance(learned, Path):
        adapter = read_adapter(learned)
        merged, file = merged_with(adapter, load(name), cache), learned
    else:
        merged, file = Path(learned.merged), Path(learned.adapter)
        if not is_whole(merged):
            raise ModelFilesError(
                f"{name} was merged with {file}, and {merged} is gone or damaged.",
                hint=f"Run: skydraft learn apply {file} --edge-model {name}, or: skydraft learn revert.",
            )
    engine = load(str(merged))
    engine.name = f"{name}+{file.stem}"
    return engine


def trained_on(learned: Path | Applied | None) -> frozenset[str]:
    """Return the digests of the prompts that an adapter was trained on; none for no adapter. Raises OptionError."""
    if learned is None:
        return frozenset()
    digests = learned.trained_on if isinstance(learned, Applied) else read_adapter(learned).card.trained_on
    if not digests:
        raise OptionError(
            "The adapter does not say what it was trained on, so no limits can be found for it.",
            hint="Train it again with: skydraft learn train.",
        )
    return frozenset(digests)


def apply(adapter: Path, model: str, bare: Engine, cache: Path) -> Path:
    """Use the model with this adapter alone from now on, and close the engine `bare`.

    Returns the place of the merged model. Raises a SkydraftError.
    """
    read = read_adapter(adapter)
    merged = merged_with(read, bare, cache)
    set_applied(cache, model, Applied(str(adapter.absolute()), str(merged), read.card.trained_on))
    return merged


def revert(model: str, cache: Path) -> Applied:
    """Use the model as it was, and delete the merged one. Raises OptionError where nothing is applied."""
    entry = applied(cache).get(model)
    if entry is None:
        raise OptionError(f"No adapter is applied to {model}.", hint="Name the model with --edge-model.")
    set_applied(cache, model, None)
    return entry


def merged_with(adapter: Adapter, bare: Engine, cache: Path) -> Path:
    """Merge an adapter into the model of an engine, and close the engine. Returns and raises what `merge` does."""
    with bare:
        return merge(file_of(bare), bare.fingerprint, bare.name, adapter, cache)


def merge(base: Path, fingerprint: str, name: str, adapter: Adapter, cache: Path) -> Path:
    """Merge an adapter into the model at `base`, whose weights are called `fingerprint`, unless that was done before.

    A GGUF file gives a GGUF file, a folder gives a folder. Returns its place. Raises OptionError for an adapter of
    another base, ModelFilesError and NotEnoughDisk.
    """
    card = adapter.card
    if fingerprint != card.base:
        raise OptionError(
            f"This adapter was trained for {card.base_name} ({card.base[:8]}), not for {name} ({fingerprint[:8]}).",
            hint="Name the model that it was trained for, or train another.",
        )
    is_file = base.is_file()
    stem = base.stem if is_file else base.name
    out = merged_dir(cache) / f"{stem}-{adapter.fingerprint[:16]}{'.gguf' if is_file else ''}"
    if is_whole(out):
        return out
    notes = {"skydraft.base": fingerprint, "skydraft.adapter": adapter.fingerprint}
    with changing(cache) as scratch:
        if is_whole(out):  # another process made it meanwhile
            return out
        made = scratch / out.name
        if is_file:
            from skydraft.engines.trainable import write_changed

            write_changed(base, made, {name: partial(adapter.change, name) for name in adapter.pairs}, notes)
        else:
            _write_folder(base, made, adapter, notes)
        return publish(made, adapter.file, cache)


def _write_folder(base: Path, out: Path, adapter: Adapter, notes: dict[str, str]) -> None:
    out.mkdir()
    waiting = dict.fromkeys(adapter.pairs)
    for path in sorted(base.iterdir()):
        if path.suffix == ".safetensors":
            _write_changed(path, out / path.name, adapter, waiting)
        elif path.is_file():
            shutil.copyfile(path, out / path.name)
    if waiting:
        raise OptionError(f"{base} has no matrix {next(iter(waiting))} in its .safetensors files.")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"skydraft": notes}, indent=1), encoding="utf-8")


def _write_changed(path: Path, out: Path, adapter: Adapter, waiting: dict[str, Any]) -> None:
    """Copy one file of weights, change the matrices in it, and take their names out of `waiting`."""
    with importing("Merging an adapter needs", "learn"):
        import torch
        from safetensors import safe_open
        from safetensors.torch import save_file
    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise BrokenModel(f"{path} cannot be read.", hint="Fetch it again.") from error
    for key, value in tensors.items():
        for name in [name for name in waiting if _is_weight_of(key, name)]:
            changed = value.float() + torch.from_numpy(adapter.change(name))
            tensors[key] = changed.to(value.dtype).contiguous()
            del waiting[name]
    save_file(tensors, out, metadata)


def _is_weight_of(key: str, name: str) -> bool:
    """Whether a tensor in a file is the matrix that the loaded model calls `name`: what precedes the layers differs."""
    if "audio" in key or "visual" in key:
        return False
    return key.partition("layers.")[2] == f"{name.rpartition('layers.')[2]}.weight"
