"""A draft model as torch has it, to be trained: a checkpoint's folder, or a GGUF file dequantised to float32."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skydraft.engines.checkpoint import check_device, first_line, load_checkpoint, load_library, quiet
from skydraft.engines.options import EngineOptions
from skydraft.errors import BrokenModel, EngineError, MissingDependency

_OMNI = "Qwen2_5OmniThinkerForConditionalGeneration"


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model in evaluation mode, and the parts that training needs by name.

    `decoder` takes embeddings; it has a list of `layers`, called `layers_name` in the whole model, and ends in a norm.
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
        """From what the norm gives to logits, as a linear layer."""
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
    """transformers draws a bar while it dequantises, which its own setting for bars does not reach."""
    from transformers import modeling_gguf_pytorch_utils as reader

    drawn = vars(reader).get("tqdm")
    try:
        if drawn is not None:
            vars(reader)["tqdm"] = lambda tensors, **_: tensors
        yield
    finally:
        if drawn is not None:
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
        name, unused = (_OMNI, ("model.visual",)) if _is_omni(path) else ("AutoModelForCausalLM", ())
        model, _ = load_checkpoint(path, name, device, EngineOptions(), unused=unused)
    model.requires_grad_(False)
    return _parts(torch, model)


def _is_omni(path: Path) -> bool:
    try:
        kind = json.loads((path / "config.json").read_text()).get("model_type", "")
    except (OSError, ValueError, AttributeError):
        return False
    return str(kind).startswith("qwen2_5_omni")


def _parts(torch: Any, model: Any) -> TrainableModel:
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
        if is_list and name.endswith(".layers") and "audio" not in name and "visual" not in name:
            decoder = model.get_submodule(name.rpartition(".")[0])
            if hasattr(decoder, "norm"):
                return TrainableModel(model, decoder, name)
    raise EngineError(f"{type(model).__name__} has no list of layers that is known how to train.")
