"""The transformers engine on random models of two layers, made on the spot."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.engines.checkpoints.text import TransformersEngine
from skydraft.engines.options import EngineOptions

from ..later import later
from .contract import TOLERANCE, largest_difference, one_by_one, some_text
from .tiny_checkpoint import OPTIONS, copy_of, save_model

torch = later("torch")
transformers = later("transformers")

PROMPTS = ["今天天气很好", "请用一句话描述这段语音的情绪：", "The small model drafts", "a"]


def run(prompt: str, mode: str, params: DecodingParams, **given: Any) -> skydraft.Generation:
    plan = skydraft.make_plan(mode, k=given.pop("k", None))
    return skydraft.generate(prompt, plan=plan, params=params, raw=True, **given).run()


def check_generate(engine: TransformersEngine, params: DecodingParams) -> list[skydraft.Generation]:
    """What the engine writes is what transformers itself generates, greedily, never a token that only pads the head."""
    model = transformers.AutoModelForCausalLM.from_pretrained(engine.path)
    names = ("repetition_penalty", "no_repeat_ngram_size", "max_new_tokens", "min_new_tokens")
    settings = {name: getattr(params, name) or None for name in names} | {"do_sample": False, "pad_token_id": 0}
    settings["suppress_tokens"] = list(range(engine.vocab.size, model.config.vocab_size))
    texts = [run(prompt, "edge", params, edge=engine) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = torch.tensor([engine.vocab.encode(prompt)])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :]
        assert [*text.token_ids] == expected.tolist()
    return texts


@pytest.mark.parametrize("penalties", [
    {}, {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    {"repetition_penalty": 0.7, "no_repeat_ngram_size": 2, "min_new_tokens": 30},
])  # fmt: skip
def test_edge_mode_equals_generate(penalties: dict[str, Any], target: TransformersEngine) -> None:
    check_generate(target, DecodingParams(max_new_tokens=40, **penalties))


def test_end_tokens_of_the_generation_config_equal_generate(target: TransformersEngine, tmp_path: Path) -> None:
    end_id = run(PROMPTS[0], "edge", DecodingParams(max_new_tokens=40), edge=target).token_ids[11]
    (copy_of(target.path, tmp_path) / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end_id]}))
    texts = check_generate(TransformersEngine(tmp_path, OPTIONS), DecodingParams(max_new_tokens=40, min_new_tokens=5))
    assert any(text.finish_reason == "eos" for text in texts)


def test_sliding_layers_can_be_rolled_back(tmp_path: Path) -> None:
    engine = TransformersEngine(save_model(tmp_path, "MistralConfig", seed=3, sliding_window=8, head_dim=8), OPTIONS)
    text = some_text(engine, 40)
    assert largest_difference(engine, text, one_by_one(engine, text)) < TOLERANCE
    check_generate(engine, DecodingParams(max_new_tokens=40))


GPU = [pytest.mark.gpu, pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")]
AO = [pytest.mark.skipif(not find_spec("torchao"), reason="needs skydraft[quantized]")]
KINDS = [("cpu", "float32"), ("cpu", "bfloat16"), *(pytest.param("cpu", dtype, marks=AO) for dtype in ("int8", "int4"))]


@pytest.mark.parametrize(("device", "dtype"), [*KINDS, pytest.param("cuda", "float32", marks=GPU)])
def test_lossless_equals_cloud(device: str, dtype: str, folders: tuple[Path, Path]) -> None:
    options = EngineOptions(context_len=640, num_threads=1, device=device, dtype=dtype)
    target, draft = (TransformersEngine(folder, options) for folder in folders)
    assert target.open([1]).extend([1]).dtype == np.float32 and (dtype == "float32" or target.invariant_rows == 1)
    num_drafted = num_accepted = 0
    for seed, prompt in enumerate(PROMPTS):
        params = DecodingParams(max_new_tokens=30, temperature=0.8, seed=seed, repetition_penalty=1.05)
        lossless = run(prompt, "lossless", params, edge=draft, cloud=target, k=4)
        assert lossless.token_ids == run(prompt, "cloud", params, cloud=target).token_ids
        num_drafted += lossless.stats.num_draft_tokens
        num_accepted += lossless.stats.num_accepted_tokens
    assert 0 < num_accepted < num_drafted, "the pair must agree sometimes, not always, or nothing was tested"


def test_a_block_is_checked_in_one_forward_unless_exact_is_asked_for(folders: tuple[Path, Path]) -> None:
    edge, target = (TransformersEngine(folder, OPTIONS) for folder in reversed(folders))
    params, both = DecodingParams(max_new_tokens=40), {"edge": edge, "cloud": target}
    alone = run(PROMPTS[1], "cloud", params, cloud=target)
    done, exact = (run(PROMPTS[1], "lossless", params, k=6, **both, execution=how) for how in (None, "exact"))
    assert done.token_ids == exact.token_ids == alone.token_ids  # no near tie here
    assert [each.stats.exact for each in (done, exact, alone)] == [False, True, True]
    assert all(record.target.num_passes == 1 for record in done.records)
    assert all(record.target.num_passes == record.target.num_rows for record in exact.records)


@pytest.mark.parametrize(("given", "small_below", "expected"), [(0, 10**9, 1), (0, 0, 2), (3, 10**9, 3)])
def test_a_small_model_computes_on_one_thread_unless_it_is_told(
    given: int, small_below: int, expected: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger one in the same process has all of torch's; what else the process computes does, too."""
    seen: list[int] = []
    monkeypatch.setattr("skydraft.engines.checkpoints.text._SMALL_MODEL", small_below)
    torch.set_num_threads(2)
    engine = TransformersEngine(folder, replace(OPTIONS, num_threads=given))
    engine._model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    engine.open([1]).extend([1])
    assert set(seen) == {expected} and torch.get_num_threads() == (given or 2)
    torch.set_num_threads(OPTIONS.num_threads)  # as all other tests have it


def test_the_profile_is_remembered(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.engines.probe.is_busy", lambda: False)
    options = EngineOptions(context_len=64, num_threads=1, profile_path=tmp_path / "profiles.json")
    for dtype in ("float32", "float32", "bfloat16"):
        TransformersEngine(folder, replace(options, dtype=dtype))
    keys = list(json.loads(options.profile_path.read_text()))
    assert len(keys) == 2 and torch.__version__ in keys[0]


def test_a_model_larger_than_the_free_memory_is_told_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    for free in (10**9, 1000):
        monkeypatch.setattr("skydraft.engines.checkpoints.engine.free_bytes", lambda free=free: free)
        TransformersEngine(folder, replace(OPTIONS, notify=told.append))
    assert len([line for line in told if "GB are free; --dtype" in line]) == 1
