"""Adapters made up."""

import numpy as np

from skydraft.engines.adapter import Adapter, AdapterCard


def change(base: str, pairs: dict[str, tuple[int, int]], seed: int = 1) -> Adapter:
    """An adapter with random changes of matrices of these shapes, [out, in]."""
    rng = np.random.default_rng(seed)
    made = {
        matrix: (rng.normal(0, 0.3, (2, width)).astype("f"), rng.normal(0, 0.3, (height, 2)).astype("f"))
        for matrix, (height, width) in pairs.items()
    }
    return Adapter(AdapterCard(base=base, base_name="draft", architecture="qwen2", vocab="v", target="t"), 4.0, made)
