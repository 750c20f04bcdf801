"""The transformers engine on random models of two layers, made on the spot."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.engines.checkpoints.engine import failing
from skydraft.engines.checkpoints.text import TransformersEngine, cache_argument
from skydraft.engines.options import EngineOptions
from skydraft.errors import BrokenModel, EngineError, MissingDependency, OptionError

from ..later import later
from .contract import TOLERANCE, largest_difference, one_by_one, some_text
from .tiny_checkpoint import NUM_PADDING_ROWS, OPTIONS, copy_of, save_model

torch = later("torch")
transformers = later("transformers")

PROMPTS = ["今天天气很好", "请用一句话描述这段语音的情绪：", "The small model drafts", "a"]


def hf_generate(folder: Path, prompt_ids: tuple[int, ...], params: DecodingParams) -> tuple[int, ...]:
    """What transformers itself generates, greedily, never a token that only pads the head."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    names = ["repetition_penalty", "no_repeat_ngram_size", "max_new_tokens"]
    names += ["min_new_tokens"] if params.min_new_tokens else []
    settings = {name: getattr(params, name) for name in names} | {"do_sample": False, "pad_token_id": 0}
    padding = list(range(model.config.vocab_size - NUM_PADDING_ROWS, model.config.vocab_size))
    ids = torch.tensor([prompt_ids])
    token_ids = model.generate(ids, attention_mask=torch.ones_like(ids), suppress_tokens=padding, **settings)[0]
    return tuple(token_ids[len(prompt_ids) :].tolist())


def run(prompt: str, mode: str, params: DecodingParams, **given: Any) -> skydraft.Generation:
    plan = skydraft.make_plan(mode, k=given.pop("k", None))
    return skydraft.generate(prompt, plan=plan, params=params, raw=True, **given).run()


@pytest.mark.parametrize("penalties", [
    {}, {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    {"repetition_penalty": 0.7, "no_repeat_ngram_size": 2, "min_new_tokens": 30},
])  # fmt: skip
def test_edge_mode_equals_generate(penalties: dict[str, Any], target: TransformersEngine) -> None:
    params = DecodingParams(max_new_tokens=40, **penalties)
    for prompt in PROMPTS:
        text = run(prompt, "edge", params, edge=target)
        assert text.token_ids == hf_generate(target.path, target.vocab.encode(prompt), params)


def test_end_tokens_of_the_generation_config_equal_generate(target: TransformersEngine, tmp_path: Path) -> None:
    params = DecodingParams(max_new_tokens=40, min_new_tokens=5)
    end_id = run(PROMPTS[0], "edge", DecodingParams(max_new_tokens=40), edge=target).token_ids[11]
    (copy_of(target.path, tmp_path) / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end_id]}))
    engine = TransformersEngine(tmp_path, OPTIONS)
    assert engine.vocab.end_ids == {0, end_id}
    generations = [run(prompt, "edge", params, edge=engine) for prompt in PROMPTS]
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.token_ids == hf_generate(tmp_path, engine.vocab.encode(prompt), params)
    assert any(generation.finish_reason == "eos" for generation in generations)


GPU = [pytest.mark.gpu, pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")]
AO = [pytest.mark.skipif(not find_spec("torchao"), reason="needs skydraft[quantized]")]
KINDS = [("cpu", "float32", 0.0), ("cpu", "float32", 0.8), ("cpu", "bfloat16", 0.8),
         *(pytest.param("cpu", dtype, 0.8, marks=AO) for dtype in ("int8", "int4"))]  # fmt: skip


@pytest.mark.parametrize(("device", "dtype", "temperature"), [*KINDS, pytest.param("cuda", "float32", 0.8, marks=GPU)])
def test_lossless_equals_cloud(device: str, dtype: str, temperature: float, folders: tuple[Path, Path]) -> None:
    options = EngineOptions(context_len=640, num_threads=1, device=device, dtype=dtype)
    target, draft = (TransformersEngine(folder, options) for folder in folders)
    assert target.open([1]).extend([1]).dtype == np.float32 and (dtype == "float32" or target.invariant_rows == 1)
    num_drafted = num_accepted = 0
    for seed, prompt in enumerate(PROMPTS):
        params = DecodingParams(max_new_tokens=30, temperature=temperature, seed=seed, repetition_penalty=1.05)
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


def test_sliding_layers_can_be_rolled_back(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "MistralConfig", seed=3, sliding_window=8, head_dim=8)
    engine = TransformersEngine(folder, OPTIONS)
    text = some_text(engine, 40)
    assert largest_difference(engine, text, one_by_one(engine, text)) < TOLERANCE
    params = DecodingParams(max_new_tokens=40)
    expected = hf_generate(folder, engine.vocab.encode(PROMPTS[1]), params)
    assert run(PROMPTS[1], "edge", params, edge=engine).token_ids == expected


@pytest.mark.parametrize(("options", "message"), [
    (EngineOptions(dtype="int3"), "dtype must be one of float32, bfloat16, float16, int8, int4, not 'int3'"),
    (EngineOptions(device="edge=cpu"), "device must be cpu .*here, not 'edge=cpu'"),
    (EngineOptions(device="cuda:99"), "device must be cpu .*here, not 'cuda:99'"),
])  # fmt: skip
def test_options_that_cannot_apply(options: EngineOptions, message: str, folders: tuple[Path, Path]) -> None:
    with pytest.raises(OptionError, match=message):
        TransformersEngine(folders[0], options)


@pytest.mark.parametrize("given", ["cuda,edge=cpu", "cloud=cuda", "edge=cpu,cloud=cuda"])
def test_each_model_of_a_pair_has_a_device_and_a_dtype(given: str) -> None:
    sides = [EngineOptions(device=given, dtype="edge=int8").on(side) for side in ("edge", "cloud")]
    assert [(side.device, side.dtype) for side in sides] == [("cpu", "int8"), ("cuda", "float32")]


@pytest.mark.parametrize(("given", "small_below", "expected"), [(0, 10**9, 1), (0, 0, 2), (3, 10**9, 3)])
def test_a_small_model_computes_on_one_thread_unless_it_is_told(
    given: int, small_below: int, expected: int, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger one in the same process has all of torch's; what else the process computes does, too."""
    seen: list[int] = []
    monkeypatch.setattr("skydraft.engines.checkpoints.text._SMALL_MODEL", small_below)
    torch.set_num_threads(2)
    engine = TransformersEngine(folders[0], replace(OPTIONS, num_threads=given))
    engine._model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    engine.open([1]).extend([1])
    assert set(seen) == {expected} and torch.get_num_threads() == (given or 2)
    torch.set_num_threads(OPTIONS.num_threads)  # as all other tests have it


def test_the_profile_is_remembered(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.engines.probe.is_busy", lambda: False)
    options = EngineOptions(context_len=64, num_threads=1, profile_path=tmp_path / "profiles.json")
    for dtype in ("float32", "float32", "bfloat16"):
        TransformersEngine(folders[0], replace(options, dtype=dtype))
    keys = list(json.loads(options.profile_path.read_text()))
    assert len(keys) == 2 and torch.__version__ in keys[0]


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_incomplete_folder(broken: str, is_cut: bool, folders: tuple[Path, Path], tmp_path: Path) -> None:
    copy_of(folders[0], tmp_path, broken)
    if is_cut:
        (tmp_path / broken).write_bytes((folders[0] / broken).read_bytes()[:-100])
    with pytest.raises(BrokenModel) as caught:
        TransformersEngine(tmp_path, OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "Lfm2Config", seed=4, layer_types=["conv", "full_attention"])
    with pytest.raises(EngineError, match="cannot be rolled back: it has layers of the kind LinearAttentionLayer"):
        TransformersEngine(folder, OPTIONS)


@pytest.mark.parametrize(("package", "extra"), [("torch", "transformers"), ("torchao.quantization", "quantized")])
def test_needs_packages(package: str, extra: str, monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, Path]) -> None:
    """Without a package the error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"pip install 'skydraft\[{extra}\]'"):
        TransformersEngine(folders[0], replace(OPTIONS, dtype="int8"))


def test_a_model_larger_than_the_free_memory_is_told_of(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    for free in (10**9, 1000):
        monkeypatch.setattr("skydraft.engines.checkpoints.engine.free_bytes", lambda free=free: free)
        TransformersEngine(folders[0], replace(OPTIONS, notify=told.append))
    assert len([line for line in told if "GB are free; --dtype" in line]) == 1


@pytest.mark.parametrize("version", ["5.20.0", "5.24.9", "5.25.0"])
def test_a_version_that_may_not_fit_is_named_and_the_model_is_not_blamed(version: str) -> None:
    kind = MissingDependency if version == "5.25.0" else BrokenModel
    library = SimpleNamespace(__version__=version)
    with pytest.raises(kind) as raised, failing(library, "cannot load m", BrokenModel, "Fetch it."):
        raise TypeError("no 'kv'")
    error = raised.value
    assert type(error) is kind and ("Fetch it." in str(error)) == (kind is BrokenModel)
    assert (f"transformers {version} cannot load m (no 'kv')" in str(error)) == (kind is MissingDependency)
    for name in ("cache", "past_key_values"):
        called = type("Model", (), {"forward": eval(f"lambda self, {name}=None: None")})
        assert cache_argument(called) == name
