"""The class, in a vLLM 0.32 that draws as it should on a processor.

There vLLM's `expand_kernel` writes into a copy, so with any speculation the temperatures and top-k of rows with drafts
are what stood in the memory before. Its kernels for GPUs are not concerned.
"""

from typing import Any

import torch
from skydraft_vllm import Drafts
from vllm.v1.sample import rejection_sampler

__all__ = ["Drafts"]


def _expanded(x: Any, ends: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
    each = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return each.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)))


rejection_sampler.expand_batch_to_tokens = _expanded
