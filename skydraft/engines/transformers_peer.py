"""Hugging Face's own generation with the same pair: a peer to compare with, not an engine of ours.

Checkpoint folders are loaded as they are, GGUF files dequantised to float32 (which is another arithmetic than
llama.cpp's on the packed weights, and more memory: texts may differ at near ties).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skydraft.engines.checkpoint import first_line, load_library, quiet
from skydraft.errors import BrokenModel, MissingDependency
from skydraft.types import FinishReason


def check_installed(paths: Iterable[Path]) -> None:
    """Raise MissingDependency where a package is not there that a peer of these files needs. Imports nothing."""
    needed = ["torch", "transformers"]
    if any(path.suffix == ".gguf" for path in paths):
        needed += ["accelerate", "gguf"]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise MissingDependency(
            f"hf-target and hf-assisted need {', '.join(needed)} here, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed.",
            hint="Run: pip install 'skydraft[transformers]'.",
        )


class HuggingFacePair:
    """`generate()` of transformers, plain or assisted; greedy, batch 1, on the CPU unless `device` says otherwise.

    Raises MissingDependency, and BrokenModel for what transformers cannot load.
    """

    def __init__(self, draft: Path, target: Path, *, device: str = "cpu", dtype: str = "float32") -> None:
        check_installed((draft, target))
        self._torch, self._transformers = load_library()
        self._device = device
        self._target = self._load(target, dtype)
        self._draft = self._load(draft, dtype)

    def _load(self, path: Path, dtype: str) -> Any:
        folder, more = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        try:
            with quiet(self._transformers):
                model = self._transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=getattr(self._torch, dtype), local_files_only=True, **more
                )
        except Exception as error:
            raise BrokenModel(f"transformers cannot load {path} as a peer: {first_line(error)}") from error
        return model.eval().to(self._device)

    def generate(
        self, prompt_ids: tuple[int, ...], end_ids: frozenset[int], *, assisted: bool, max_new_tokens: int, k: int
    ) -> tuple[tuple[int, ...], FinishReason]:
        """(generated tokens, why it ended). Assisted: `k` drafted tokens a round, always, as our own fixed k is."""
        inputs = self._torch.tensor([prompt_ids], device=self._device)
        # Read from the assistant's own config; given to `generate` they are ignored.
        config = self._draft.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, "constant"
        config.assistant_confidence_threshold = 0.0
        with self._torch.inference_mode(), quiet(self._transformers):
            output = self._target.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(end_ids),
                pad_token_id=min(end_ids),
                repetition_penalty=1.0,
                **({"assistant_model": self._draft} if assisted else {}),
            )
        token_ids = tuple(output[0, len(prompt_ids) :].tolist())
        return token_ids, "eos" if token_ids and token_ids[-1] in end_ids else "length"
