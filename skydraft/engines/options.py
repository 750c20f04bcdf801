"""Options for running a model."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Self

from skydraft.errors import OptionError

_MOST_THREADS = 512


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to run a model. Each engine uses the options that apply to it.

    `num_threads` 0 means all cores that the process may use, and one for transformers models below 50 million
    parameters. `gpu_layers` is for GGUF files (-1: all), `device` and `dtype` are for transformers models.
    `max_sequences` limits generations at a time, and conversations kept; further generations wait for up to `wait_s`
    seconds. With a `total_len` the sequences of a GGUF model and its adapters share memory for that many tokens, taken
    as they grow. Otherwise each sequence has memory for its whole context from the start, and one forward can feed
    several. `notify` gets lines to show.
    """

    context_len: int = 4096
    max_sequences: int = 1
    total_len: int = 0
    wait_s: float = 300.0
    num_threads: int = 0
    gpu_layers: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    profile_path: Path | None = None
    notify: Callable[[str], None] = field(default=lambda line: None, compare=False, repr=False)

    def __post_init__(self) -> None:
        counts = (self.context_len, self.max_sequences, self.num_threads, self.gpu_layers)
        if not all(isinstance(count, Integral) for count in counts):
            raise OptionError("--context, --parallel, --threads and --gpu-layers must be whole numbers.")
        if not isinstance(self.wait_s, Real) or not 0 <= self.wait_s <= TIMEOUT_MAX:
            raise OptionError(f"wait_s must be a number of seconds from 0 to {TIMEOUT_MAX:.0f}, not {self.wait_s}.")
        if self.context_len < 16 or self.max_sequences < 1 or not 0 <= self.num_threads <= _MOST_THREADS:
            most = f"--threads 0 to {_MOST_THREADS}"
            raise OptionError(f"--context must be 16 or more, --parallel 1 or more, and {most}.")

    def on(self, side: str) -> Self:
        """Return the options for one side of a pair: edge=cpu,cloud=cuda gives each side a `device` (or `dtype`)."""
        return replace(self, device=_on(side, self.device, "cpu"), dtype=_on(side, self.dtype, "float32"))


def _on(side: str, given: str, default: str) -> str:
    values = {"": default, **dict(part.rpartition("=")[::2] for part in given.split(","))}
    if not values.keys() <= {"", "edge", "cloud"}:
        raise OptionError(f"'{given}' names another side than edge and cloud.", hint=f"For example: edge={default}.")
    return values.get(side, values[""])
