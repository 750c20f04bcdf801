"""Models to be trained: a checkpoint's folder, or a GGUF file dequantised to float32, as torch has it.

What was trained goes into a GGUF file by `write_changed`, which copies all else byte for byte, so that nothing else is
rounded again. A changed matrix that was packed into fewer than 8 bits becomes one of Q8_0 (one scale for 32 weights),
and any other keeps its type: what training changes is often smaller than half a step of 4 or 5 bits.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from skydraft.engines.checkpoint import check_device, first_line, load_checkpoint, load_library, quiet
from skydraft.engines.options import EngineOptions
from skydraft.errors import BrokenModel, EngineError, MissingDependency, OptionError, importing

Matrix = npt.NDArray[np.float32]
_STRING = 8  # the type of a value in the header of a GGUF file
# Architectures whose matrices lie in a GGUF file as they do in a checkpoint: those of llama permute q and k.
_PLAIN = ("qwen2", "qwen3")
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model in evaluation mode, and the parts that training needs by name.

    `decoder` takes token ids; it has a list of `layers`, called `layers_name` in the whole model, and ends in a norm.
    """

    model: Any
    decoder: Any
    layers_name: str

    @property
    def layers(self) -> Any:
        """The decoder's layers, first to last."""
        return self.decoder.layers

    @property
    def head(self) -> Any:
        """The linear layer from the last norm to logits."""
        return self.model.get_output_embeddings()


def check_trainable(path: Path) -> None:
    """Raise MissingDependency where a package is not there that training needs for this file. Imports nothing."""
    needed = ["torch", "transformers", "peft", "safetensors"]
    if path.suffix == ".gguf":
        needed += ["accelerate", "gguf"]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise MissingDependency(
            f"Training needs {', '.join(needed)}, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed.",
            hint="Run: pip install 'skydraft[learn]'.",
        )


@contextmanager
def _without_bar() -> Iterator[None]:
    """Hide the progress bar of dequantising, which the setting of transformers does not reach."""
    from transformers import modeling_gguf_pytorch_utils as reader

    drawn = vars(reader).get("tqdm")
    vars(reader)["tqdm"] = lambda tensors, **_: tensors
    try:
        yield
    finally:
        vars(reader)["tqdm"] = drawn


def load_trainable(path: Path, device_name: str = "cpu", num_threads: int = 0) -> TrainableModel:
    """The model of a folder or .gguf file in float32, nothing of it trained yet. Raises BrokenModel, EngineError.

    `num_threads` other than 0 sets the threads of torch for the whole process.
    """
    torch, transformers = load_library()
    if num_threads:
        torch.set_num_threads(num_threads)
    device = check_device(torch, device_name)
    if path.suffix == ".gguf":
        try:
            with quiet(transformers), _without_bar():
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
                )
        except Exception as error:
            raise BrokenModel(f"transformers cannot load {path}: {first_line(error)}") from error
        model = model.eval().to(device)
    else:
        model, _ = load_checkpoint(path, "AutoModelForCausalLM", EngineOptions(device=device_name))
    model.requires_grad_(False)
    return _parts(torch, model)


def _parts(torch: Any, model: Any) -> TrainableModel:
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
        if is_list and name.endswith(".layers"):
            decoder = model.get_submodule(name.rpartition(".")[0])
            if hasattr(decoder, "norm"):
                return TrainableModel(model, decoder, name)
    raise EngineError(f"{type(model).__name__} has no list of layers that is known how to train.")


def write_changed(base: Path, out: Path, changes: Mapping[str, Callable[[], Matrix]], notes: Mapping[str, str]) -> None:
    """Write `base` with `changes`, by the matrix names of the checkpoint, added to it, and `notes` in its header.

    Raises BrokenModel for a file that cannot be read, OptionError for one that cannot hold the changes, and OSError.
    """
    reader = _reader(base)
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in _PLAIN:
        raise OptionError(
            f"{base.name} is a {architecture}, and adapters go into GGUF files of {' or '.join(_PLAIN)}.",
            hint="Use the model's checkpoint folder.",
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {gguf_name(name): change for name, change in changes.items()}
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise OptionError(
            f"{base.name} has no matrix {missing[0]}.", hint="Name the model that the adapter was trained for."
        )
    places = _places(reader, wanted)
    with out.open("wb") as target:
        target.write(_header(bytes(reader.data[: reader.data_offset]), reader, places, notes))
        start = target.tell()
        for place in places:
            target.write(bytes(start + place.offset - target.tell()))  # padding
            change = wanted.get(place.tensor.name)
            target.write(_changed(place, change()) if change else place.tensor.data)


class _Place(NamedTuple):
    """Where a tensor goes, counted from the beginning of the data, and as what."""

    tensor: Any
    kind: Any
    offset: int


def _places(reader: Any, changed: Container[str]) -> list[_Place]:
    """Every tensor of a file in the order of its data."""
    places, offset = [], 0
    for tensor in sorted(reader.tensors, key=lambda each: int(each.data_offset)):
        kind, num_bytes = tensor.tensor_type, int(tensor.n_bytes)
        if tensor.name in changed:
            kind, num_bytes = _finer(tensor)
        places.append(_Place(tensor, kind, offset))
        offset += num_bytes + -num_bytes % reader.alignment
    return places


def _finer(tensor: Any) -> tuple[Any, int]:
    """(type, bytes) in which a matrix can hold a small change."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind, row_len = tensor.tensor_type, int(tensor.shape[0])
    if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16):
        kind = GGMLQuantizationType.Q8_0
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    if row_len % block_len:
        raise OptionError(f"{tensor.name} has rows of {row_len} weights, which {kind.name} cannot hold.")
    return kind, int(tensor.n_elements) // block_len * block_bytes


def _reader(path: Path) -> Any:
    with importing("Changing a GGUF file needs", "learn"):
        from gguf import GGUFReader
    try:
        return GGUFReader(path)
    except Exception as error:  # a damaged file raises errors of many kinds
        raise BrokenModel(f"{path} cannot be read as GGUF: {error}.", hint="Fetch it again.") from error


def gguf_name(name: str) -> str:
    """A matrix's name in a GGUF file: `blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj`."""
    number, _, part = name.partition("layers.")[2].partition(".")
    return f"blk.{number}.{_PARTS.get(part, part)}.weight"


def _changed(place: _Place, change: Matrix) -> bytes:
    from gguf.quants import dequantize, quantize

    weights = dequantize(place.tensor.data, place.tensor.tensor_type).reshape(change.shape) + change
    data: bytes = quantize(np.ascontiguousarray(weights, np.float32), place.kind).tobytes()
    return data


def _header(old: bytes, reader: Any, places: Sequence[_Place], notes: Mapping[str, str]) -> bytes:
    """All before the tensors' data, with their new types and offsets, and with `notes`.

    The last note ends in spaces up to a multiple of the alignment, so that the padding before the data stays right.
    """
    data = bytearray(old)
    for place in places:
        # length of the name, name, number of dimensions, dimensions, type, offset
        name_len, name, _, dims = place.tensor.field.parts[:4]
        at = place.tensor.field.offset + name_len.nbytes + name.nbytes + 4 + dims.nbytes
        struct.pack_into("<IQ", data, at, int(place.kind), place.offset)
    entries = [(key.encode(), value.encode()) for key, value in notes.items()]
    size = sum(8 + len(key) + 4 + 8 + len(value) for key, value in entries)
    last_key, last_value = entries[-1]
    entries[-1] = last_key, last_value + b" " * (-size % reader.alignment)
    added = b"".join(
        struct.pack("<Q", len(key)) + key + struct.pack("<IQ", _STRING, len(value)) + value for key, value in entries
    )
    # magic, version, number of tensors, number of entries
    (num_entries,) = struct.unpack_from("<Q", data, 16)
    return bytes(data[:16]) + struct.pack("<Q", num_entries + len(entries)) + added + bytes(data[24:])
