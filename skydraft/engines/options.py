"""How to run a model, and what its forwards cost and give on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from skydraft.errors import OptionError

Quantization = Literal["none", "8bit", "4bit"]


@dataclass(frozen=True, slots=True)
class RowProfile:
    """What forwards of n rows cost and give, measured on this machine.

    `invariant_rows`: how many rows one forward may hold and still be bit-identical to one row at a time; so it was up
    to `probed_len` tokens, and nobody looked beyond. `forward_ms[n - 1]`: best time of a forward of n rows,
    milliseconds. `date`: the day, in ISO format; "" where nothing was measured.
    """

    invariant_rows: int
    forward_ms: tuple[float, ...]
    date: str = ""
    probed_len: int = 0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a model; each engine takes what applies to it.

    `num_threads` 0 means all cores that the process may use. `gpu_layers` is for GGUF files (-1: all). `device` and
    `dtype` are for transformers models, `quantization` for those on a GPU. `shared_cache` lets sequences of a GGUF
    model share one KV cache, so that any feeds fit into one forward; the cells of a sequence lose their order then, and
    logits their bit-equality. `probe_again` measures the row costs anew, whatever is remembered of them at
    `profile_path`.
    """

    context_len: int = 4096
    max_sequences: int = 1
    shared_cache: bool = False
    num_threads: int = 0
    gpu_layers: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    quantization: Quantization = "none"
    profile_path: Path | None = None
    probe_again: bool = False

    def __post_init__(self) -> None:
        if self.context_len < 16:
            raise OptionError(f"A context of {self.context_len} tokens is too short.", hint="Use --context 16 or more.")
        if self.num_threads < 0:
            raise OptionError(f"--threads must be 0 or more, not {self.num_threads}.")
        if self.quantization not in get_args(Quantization):
            raise OptionError(f"--quantization must be none, 8bit or 4bit, not '{self.quantization}'.")
