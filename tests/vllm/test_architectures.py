"""Each architecture that is registered judges, from a checkpoint's folder to a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.config import decoding_params
from skydraft.engines.options import EngineOptions
from tests.engines.tiny_checkpoint import save_model
from tests.vllm.conftest import CONTEXT, SHAPE, on_vllm
from tests.vllm.test_serving import written


@pytest.mark.parametrize("config", ["Qwen3Config", "LlamaConfig"])
def test_a_text_is_what_transformers_writes(config: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"head_dim": 32}
    folder = save_model(tmp_path, config, seed=3, **SHAPE, **more)
    target = skydraft.load(folder, EngineOptions(context_len=CONTEXT, num_threads=1))
    with on_vllm(folder) as server:
        for number, text in enumerate(("你好世界", "我们在说abc", "大的")):
            params = decoding_params(max_new_tokens=40, temperature=0.8 * (number % 2), seed=number)
            lossless = written(server, target, text, params, "lossless")
            assert lossless == written(target, target, text, params, "cloud")
