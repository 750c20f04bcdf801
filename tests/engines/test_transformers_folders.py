"""Folders of checkpoints: whole ones, those of a thinker in each form, and what is incomplete, broken or unfit."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from skydraft.engines.checkpoints.engine import failing
from skydraft.engines.checkpoints.omni import OmniEngine
from skydraft.engines.checkpoints.text import TransformersEngine, cache_argument
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.errors import BrokenModel, EngineError, MissingDependency, OptionError

from ..later import later
from .contract import rows_after
from .tiny_checkpoint import OPTIONS, copy_of, make_full, save_model, spoken

torch = later("torch")
transformers = later("transformers")


@pytest.mark.parametrize(("options", "message"), [
    (EngineOptions(dtype="int3"), "dtype must be one of float32, bfloat16, float16, int8, int4, not 'int3'"),
    (EngineOptions(device="edge=cpu"), "device must be cpu .*here, not 'edge=cpu'"),
    (EngineOptions(device="cuda:99"), "device must be cpu .*here, not 'cuda:99'"),
])  # fmt: skip
def test_options_that_cannot_apply(options: EngineOptions, message: str, folder: Path) -> None:
    with pytest.raises(OptionError, match=message):
        TransformersEngine(folder, options)


@pytest.mark.parametrize("given", ["cuda,edge=cpu", "cloud=cuda", "edge=cpu,cloud=cuda"])
def test_each_model_of_a_pair_has_a_device_and_a_dtype(given: str) -> None:
    sides = [EngineOptions(device=given, dtype="edge=int8").on(side) for side in ("edge", "cloud")]
    assert [(side.device, side.dtype) for side in sides] == [("cpu", "int8"), ("cuda", "float32")]


@pytest.mark.parametrize(("kind", "broken"), [
    *(("text", name) for name in ("config.json", "model.safetensors", "tokenizer.json")),
    ("omni", "preprocessor_config.json"),
])  # fmt: skip
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_incomplete_folder(
    kind: str, broken: str, is_cut: bool, folder: Path, omni_folder: Path, tmp_path: Path
) -> None:
    source, load = (folder, TransformersEngine) if kind == "text" else (omni_folder, OmniEngine)
    copy_of(source, tmp_path, broken)
    if is_cut:
        (tmp_path / broken).write_bytes((source / broken).read_bytes()[:-100])
    with pytest.raises(BrokenModel) as caught:
        load(tmp_path, OPTIONS)
    assert "\n" not in str(caught.value)


def test_a_missing_weight_is_not_drawn_at_random(omni_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(omni_folder / "model.safetensors")
    del weights["audio_tower.layers.1.fc1.weight"]
    save_file(weights, copy_of(omni_folder, tmp_path) / "model.safetensors", metadata={"format": "pt"})
    make_full(tmp_path)
    with pytest.raises(BrokenModel, match=r"lacks weights of its model: model\.audio_tower\.layers\.1\.fc1\.weight"):
        OmniEngine(tmp_path, OPTIONS)


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "Lfm2Config", seed=4, layer_types=["conv", "full_attention"])
    with pytest.raises(EngineError, match="cannot be rolled back: it has layers of the kind LinearAttentionLayer"):
        TransformersEngine(folder, OPTIONS)


@pytest.mark.parametrize(("package", "extra"), [("torch", "transformers"), ("torchao.quantization", "quantized")])
def test_needs_packages(package: str, extra: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Without a package the error says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"pip install 'skydraft\[{extra}\]'"):
        TransformersEngine(folder, replace(OPTIONS, dtype="int8"))


@pytest.mark.parametrize("version", ["5.20.0", "5.24.9", "5.25.0"])
def test_a_version_that_may_not_fit_is_named_and_the_model_is_not_blamed(version: str) -> None:
    kind = MissingDependency if version == "5.25.0" else BrokenModel
    says = rf"transformers {version} cannot load m \(no 'kv'\)" if kind is MissingDependency else "Fetch it"
    library = SimpleNamespace(__version__=version)
    with pytest.raises(kind, match=says), failing(library, "cannot load m", BrokenModel, "Fetch it."):
        raise TypeError("no 'kv'")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_given_by_the_name_that_a_version_of_transformers_has_for_it(name: str) -> None:
    assert cache_argument(type("Model", (), {"forward": eval(f"lambda self, {name}=None: None")})) == name


def test_the_chat_template_of_a_processor(omni_folder: Path, tmp_path: Path) -> None:
    copy_of(omni_folder, tmp_path, "chat_template.jinja")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert OmniEngine(tmp_path, OPTIONS).vocab.chat_template == "{{ messages }}"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(BrokenModel, match="holds no chat template"):
        OmniEngine(tmp_path, OPTIONS)


def test_a_whole_checkpoint_gives_its_thinker_alone(omni: OmniEngine, omni_folder: Path, tmp_path: Path) -> None:
    make_full(copy_of(omni_folder, tmp_path))
    engine = open_engine("whole", tmp_path, OPTIONS)
    assert isinstance(engine, OmniEngine)
    prompt, media = spoken(engine, 1, 1.3)
    one, other = (rows_after(each.open(prompt, media), prompt[-1], 20) for each in (engine, omni))
    assert [row.argmax() for row in one] == [row.argmax() for row in other]
    names = {".".join(name.split(".")[:2]) for name, _ in engine._model.named_parameters()}
    assert names == {"model.audio_tower", "model.language_model", "lm_head.weight"}
