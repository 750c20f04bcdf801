"""vLLM's models with a pooler that judges blocks. vLLM alone imports this module, in its worker process."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.pooler import Pooler, PoolingParamsUpdate
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from skydraft.cloud.vllm.pooling import BlockPooler, Computed
from skydraft.engines.checkpoint import load_vocab
from skydraft.engines.rows import Rows


class JudgingPooler(Pooler):  # type: ignore[misc]  # vLLM has types that mypy is not shown
    """Passes the hidden states of a forward to a `BlockPooler`; returns its answers as tensors of bytes."""

    def __init__(self, model: Any, folder: Path) -> None:
        super().__init__()
        vocab = load_vocab(folder)
        vocab.classes  # noqa: B018  computed now, not in the first request
        self._compute = [model.compute_logits]  # in a list: an attribute would register it as a submodule
        self._blocks = BlockPooler(vocab, self._logits)

    def get_supported_tasks(self) -> set[str]:
        """The one task whose rows may come in parts and from the prefix cache."""
        return {"token_classify"}

    def get_pooling_updates(self, task: str) -> Any:
        """Ask for the ids of whole requests, which chunks and the prefix cache would hide."""
        return PoolingParamsUpdate(requires_token_ids=True)

    def _logits(self, hidden: Seq[Rows]) -> list[Rows]:
        (compute,) = self._compute
        return list(torch.split(compute(torch.cat(list(hidden))), [len(rows) for rows in hidden]))

    def forward(self, hidden_states: Any, pooling_metadata: Any) -> list[Any]:
        """One tensor for each complete request, None for the others."""
        answers = self._blocks.pool(_parts(hidden_states, pooling_metadata))
        return [None if each is None else torch.tensor(list(each), dtype=torch.uint8) for each in answers]


def _parts(hidden: Any, metadata: Any) -> list[Computed]:
    cursor = metadata.get_pooling_cursor()
    parts = []
    at = 0
    for index, num_rows in enumerate(cursor.num_scheduled_tokens_cpu.tolist()):
        ids = metadata.prompt_token_ids_cpu
        asked = metadata.pooling_params[index].extra_kwargs
        token_ids = np.zeros(0, np.int32)
        if asked and ids is not None:
            token_ids = ids[index, : int(metadata.prompt_lens[index])].numpy().astype(np.int32)
        parts.append(
            Computed(
                asked,
                token_ids,
                int(cursor.seq_lens_cpu[index]) - num_rows,
                hidden[at : at + num_rows],
                metadata.pooling_states[index],
                cursor.get_finished_mask()[index],
            )
        )
        at += num_rows
    return parts


class _Judging:
    """Mixin for a generation model: keeps its lm_head for the pooler."""

    is_pooling_model = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.pooler = JudgingPooler(self, Path(vllm_config.model_config.model))


class SkydraftQwen2(_Judging, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2 that judges."""


class SkydraftQwen3(_Judging, Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3 that judges."""


class SkydraftLlama(_Judging, LlamaForCausalLM):  # type: ignore[misc]
    """Llama that judges."""
