"""Adapters: low-rank changes to some matrices of a model (LoRA, arXiv 2106.09685), which an engine adds as it runs.

An adapter is a GGUF file as llama.cpp reads it. For each matrix NAME of the base it has `NAME.lora_a` [rank, in] and
`NAME.lora_b` [out, rank], in float32; the change is alpha / rank · B · A. Names follow the base's own file. The field
`skydraft.card` describes its training in JSON.
"""

import errno
import hashlib
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from skydraft.errors import OptionError, RecordsError, importing
from skydraft.files import Stored, write_whole

Matrix = npt.NDArray[np.float32]
_CARD, _ALPHA = "skydraft.card", "adapter.lora.alpha"
_SIDES = ("lora_a", "lora_b")


class AdapterCard(Stored):
    """The models and prompts of an adapter's training. All these prompts share their first `beginning_len` tokens,
    with the digest `beginning`; 0 if they share no beginning of their own."""

    base: str
    base_name: str
    architecture: str = ""
    vocab: str
    target: str
    trained_on: tuple[str, ...] = ()  # digests of the prompts
    beginning_len: int = Field(default=0, ge=0)
    beginning: str = ""

    def begins(self, prompt: Seq[int] | npt.NDArray[np.int32]) -> bool:
        """Whether a prompt begins like all prompts that the adapter was trained for."""
        return 0 < self.beginning_len < len(prompt) and digest(prompt[: self.beginning_len]) == self.beginning

    def check_base(self, fingerprint: str, name: str) -> None:
        """Raise OptionError unless the adapter was trained for these weights."""
        if fingerprint != self.base:
            own, other = f"{self.base_name} ({self.base[:8]})", f"{name} ({fingerprint[:8]})"
            hint = "Name the model that it was trained for, or train another."
            raise OptionError(f"This adapter was trained for {own}, not for {other}.", hint=hint)


def digest(token_ids: Seq[int] | npt.NDArray[np.int32]) -> str:
    """Return 16 hex digits that identify a prompt, or the beginning of one."""
    return hashlib.sha256(np.asarray(token_ids, "<i4").tobytes()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Pairs (A, B) of one rank, by the name of the changed matrix."""

    card: AdapterCard
    alpha: float
    pairs: Mapping[str, tuple[Matrix, Matrix]]

    @property
    def rank(self) -> int:
        return len(next(iter(self.pairs.values()))[0])

    @property
    def fingerprint(self) -> str:
        """32 hex digits that identify the base with these changes; the fingerprint of an engine that adds them."""
        total = hashlib.sha256(f"{self.card.base} {self.alpha}".encode())
        for name in sorted(self.pairs):
            total.update(name.encode())
            for matrix in self.pairs[name]:
                total.update(np.ascontiguousarray(matrix).tobytes())
        return total.hexdigest()[:32]


def write_adapter(path: Path, adapter: Adapter) -> None:
    """Write an adapter's file, readable by its owner only. Raises OSError."""
    with importing("Adapters need", "learn"):
        from gguf import GGUFWriter
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside it, where room is needed anyway. GGUFWriter does not report a full disk, so the file is read back.
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        made = Path(folder) / "adapter"
        writer = GGUFWriter(made, adapter.card.architecture)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32(_ALPHA, adapter.alpha)
        writer.add_string(_CARD, adapter.card.model_dump_json())
        for name, pair in adapter.pairs.items():
            for side, matrix in zip(_SIDES, pair, strict=True):
                writer.add_tensor(f"{name}.{side}", np.ascontiguousarray(matrix, np.float32))
        try:
            for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
                write()
            writer.close()
            read_adapter(made)
        except RecordsError as error:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        write_whole(path, made.read_bytes(), 0o600)


def read_adapter(path: Path) -> Adapter:
    """Read an adapter from its file. Raises RecordsError if the file is missing or not an adapter."""
    if not path.is_file():
        raise RecordsError(f"{path} cannot be read: it is not a file.", hint="Check its name.")
    with importing("Adapters need", "learn"):
        from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):  # type: ignore[misc]
        """A reader that refuses arrays: adapters have none, and a forged length would fill the memory."""

        def _get_field_parts(self, offset: int, kind: int) -> Any:
            if kind == GGUFValueType.ARRAY:
                raise ValueError("it has an array")
            return super()._get_field_parts(offset, kind)

    try:
        reader = Reader(path)
        fields = reader.fields
        card = AdapterCard.model_validate_json(fields[_CARD].contents())
        tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
        names = sorted({name.rpartition(".")[0] for name in tensors})
        adapter = Adapter(card, fields[_ALPHA].contents(), {name: _pair(tensors, name) for name in names})
        # llama.cpp crashes on a value of another type
        form = {"general.type": "adapter", "general.architecture": card.architecture, "adapter.type": "lora"}
        is_one = all(fields[key].contents() == value for key, value in form.items())
        is_one = is_one and fields[_ALPHA].types == [GGUFValueType.FLOAT32] and 0 < adapter.alpha < math.inf
        if not is_one or len(tensors) != 2 * len(names) or len({len(low) for low, _ in adapter.pairs.values()}) != 1:
            raise ValueError("it changes nothing, or is of another form")
    except Exception as error:  # a damaged file raises many kinds of errors
        hint = "Make one with: skydraft learn run."
        raise RecordsError(f"{path} is not an adapter of this version, or it is damaged.", hint=hint) from error
    return adapter


def _pair(tensors: Mapping[str, Matrix], name: str) -> tuple[Matrix, Matrix]:
    low, high = (tensors[f"{name}.{side}"] for side in _SIDES)
    fits = low.ndim == high.ndim == 2 and len(low) == high.shape[1] and low.dtype == high.dtype == np.float32
    if not fits or not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(f"{name} is no low-rank change")
    return low, high


def inject(model: Any, names: Seq[str], rank: int, alpha: float, label: str = "default") -> dict[str, Any]:
    """Add trainable changes, still 0, to matrices of a torch model; returns the new parameters by name."""
    with importing("Adapters need", "learn"):
        from peft import LoraConfig, inject_adapter_in_model
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(names), lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are intended
        inject_adapter_in_model(config, model, label)
    end = f".{label}.weight"
    return {name: value for name, value in model.named_parameters() if ".lora_" in name and name.endswith(end)}


class AdaptedModel:
    """A torch model and its adapters. Each forward uses one, or none (label ""). Any thread may use it."""

    def __init__(self, model: Any, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self._model, self._active, self._num_added = model, "", 0
        self._lock = threading.RLock()

    @contextmanager
    def using(self, label: str) -> Iterator[Any]:
        """Yield the model with one adapter; other threads wait meanwhile."""
        with self._lock:
            if label != self._active:
                self._activate(label)
            yield self._model

    def _activate(self, label: str) -> None:
        from peft.tuners.lora import LoraLayer

        for module in self._model.modules():
            if isinstance(module, LoraLayer):
                module.set_adapter([label] if label else [], inference_mode=True)
        self._active = label

    def add(self, path: Path, name: str) -> tuple[str, str]:
        """Add an adapter; returns its label, and the fingerprint of model and adapter. Raises OptionError unless it was
        trained for this model, called `name`, and RecordsError for a file that is damaged or does not fit."""
        import torch

        adapter = read_adapter(path)
        adapter.card.check_base(self.fingerprint, name)
        with self._lock:
            label = f"adapter{self._num_added}"
            try:
                values = inject(self._model, list(adapter.pairs), adapter.rank, adapter.alpha, label)
                with torch.no_grad():
                    for matrix, pair in adapter.pairs.items():
                        for side, given in zip("AB", pair, strict=True):
                            value = values[f"{matrix}.lora_{side}.{label}.weight"]
                            if value.shape != given.shape:  # `copy_` would broadcast a single row
                                raise ValueError(f"{matrix} has another form")
                            value.copy_(torch.from_numpy(given))
            except (KeyError, ValueError, RuntimeError) as error:
                self.remove(label)
                raise RecordsError(f"{path} does not fit {name}.", hint="Train another.") from error
            finally:
                self._num_added += 1
                self._activate("")
        return label, adapter.fingerprint

    def remove(self, label: str) -> None:
        """Free an adapter that no forward uses any more."""
        from peft.tuners.lora import LoraLayer

        with self._lock:
            self._activate("")
            for module in self._model.modules():
                if isinstance(module, LoraLayer):
                    module.delete_adapter(label)
