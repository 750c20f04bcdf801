"""Models for training in torch: a checkpoint folder, or a GGUF file dequantised to float32."""

import io
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skydraft.engines.checkpoints.engine import check_device, failing, load_checkpoint, load_library, quiet
from skydraft.engines.options import EngineOptions
from skydraft.errors import BrokenModel, EngineError, OptionError, importing

# Architectures with the same matrices in GGUF files and checkpoints. (GGUF files of llama permute q and k.)
_PLAIN = ("qwen2", "qwen3")
_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model in evaluation mode, and the parts that training needs.

    `decoder` takes token ids; it has a list of `layers`, called `layers_name` in the whole model, and ends in a norm.
    `head` is the linear layer from the norm to logits. `is_gguf` means that it was read from a GGUF file.
    """

    model: Any
    decoder: Any
    layers_name: str
    head: Any
    is_gguf: bool

    def name_in_file(self, matrix: str) -> str:
        """Return a matrix's name in the file: `blk.3.attn_q.weight` in GGUF for `….layers.3.self_attn.q_proj`."""
        if not self.is_gguf:
            return matrix
        number, _, part = matrix.removeprefix(f"{self.layers_name}.").partition(".")
        return f"blk.{number}.{_PARTS[part]}.weight"


def check_trainable() -> None:
    """Raise MissingDependency if training lacks a package."""
    with importing("Training needs", "learn"):
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import peft  # noqa: F401
    load_library()


def load_trainable(path: Path, device_name: str = "cpu", num_threads: int = 0) -> TrainableModel:
    """Load a folder or .gguf file in float32, all parameters frozen.

    `num_threads` other than 0 sets torch's threads for the whole process. Raises BrokenModel, EngineError, and
    OptionError for a GGUF file with another matrix order than torch's.
    """
    torch, transformers = load_library()
    if num_threads:
        torch.set_num_threads(num_threads)
    device = check_device(torch, device_name)
    if path.suffix == ".gguf":
        does, bar = f"cannot load {path}", io.StringIO()  # hides the library's own progress bar
        with failing(transformers, does, BrokenModel), quiet(transformers), redirect_stderr(bar):
            load = transformers.AutoModelForCausalLM.from_pretrained
            model = load(path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True)
        model = model.eval().to(device)
        if (kind := model.config.model_type) not in _PLAIN:
            says = f"{path.name} is a {kind}; adapters can be trained only for GGUF files of {' or '.join(_PLAIN)}."
            raise OptionError(says, hint="Use the model's checkpoint folder.")
    else:
        model, _ = load_checkpoint(path, "AutoModelForCausalLM", EngineOptions(device=device_name))
    model.requires_grad_(False)
    return _parts(torch, model, path.suffix == ".gguf")


def _parts(torch: Any, model: Any, is_gguf: bool) -> TrainableModel:
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        is_list = isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
        if is_list and name.endswith(".layers"):
            decoder = model.get_submodule(name.rpartition(".")[0])
            if hasattr(decoder, "norm"):
                return TrainableModel(model, decoder, name, model.get_output_embeddings(), is_gguf)
    raise EngineError(f"{type(model).__name__} has no list of layers that can be trained.")
