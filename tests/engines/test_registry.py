"""Which engine opens a model: ours by file and folder, plug-ins by name or because they claim it, whole or broken."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines import registry
from skydraft.engines.llamacpp import LlamaCppEngine
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import EngineKind, engine_names, open_engine
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.engines.transformers_omni import OmniEngine
from skydraft.engines.transformers_text import TransformersEngine
from skydraft.errors import BrokenModel, MissingDependency, OptionError


def open_named(spec: str, path: Path, options: EngineOptions) -> ToyEngine:
    engine = open_toy("toy")
    engine.name = f"{spec} at {path}, {options.num_threads} threads"
    return engine


NAMED = EngineKind("a model of ours", open_named, takes=frozenset({"num_threads"}))
AWQ = EngineKind("an AWQ checkpoint", open_named, claims=lambda path: (path / "awq").exists())


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes these the only plug-ins, by name and value."""

    def replace(**values: str) -> None:
        points = [EntryPoint(name, value, "skydraft.engines") for name, value in values.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return replace


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Who opened what; nothing is loaded."""
    calls: list[tuple[str, Path]] = []
    for kind in (LlamaCppEngine, TransformersEngine, OmniEngine):

        def note(self: Any, path: Path, options: EngineOptions, *, name: str = "") -> None:
            calls.append((type(self).__name__, path))

        monkeypatch.setattr(kind, "__init__", note)
    return calls


THINKER = '"audio_config": {}, "text_config": {}, "vision_config": {}}'
OMNI, NO_OMNI = "OmniEngine", "TransformersEngine"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"model_type": "qwen2_5_omni", "thinker_config": {' + THINKER + "}", OMNI),
        ('{"model_type": "qwen2_5_omni_thinker", ' + THINKER, OMNI),
        ('{"model_type": "qwen2_5_omni_thinker", "audio_config": {}}', NO_OMNI),  # transformers would make up the rest
        ('{"model_type": "qwen2_5_omni", "thinker_config": null}', NO_OMNI), ('{"model_type": "qwen2"}', NO_OMNI),
        *((text, NO_OMNI) for text in ('{"model_type": []}', "", "[]", "{}", "\udcff")), (None, "LlamaCppEngine"),
    ],
)  # fmt: skip
def test_a_folder_goes_by_its_model_type_and_a_file_is_for_llama_cpp(
    config: str | None, expected: str, tmp_path: Path, opened: list[tuple[str, Path]]
) -> None:
    path = tmp_path
    if config is None:
        (path := tmp_path / "m.gguf").touch()
    else:
        (tmp_path / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    open_engine("", "a", path, EngineOptions())
    assert opened == [(expected, path)]
    with pytest.raises(BrokenModel, match="No engine opens a"):
        open_engine("", "a", tmp_path / "gone.gguf", EngineOptions())


@pytest.mark.parametrize(
    ("kind", "option", "value", "message"),
    [
        ("toy", "num_threads", 2, "threads does not apply to toy:x, which is a toy"),
        ("gguf", "dtype", "bfloat16", "dtype does not apply to m.gguf, which is a GGUF model"),
        ("folder", "gpu_layers", 1, "gpu_layers does not apply to f, which is a transformers checkpoint"),
    ],
)
def test_an_option_that_does_not_apply(kind: str, option: str, value: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    spec, path = {"toy": ("toy:x", None), "gguf": ("m.gguf", tmp_path / "m.gguf"), "folder": ("f", tmp_path)}[kind]
    with pytest.raises(OptionError, match=message):
        open_engine(kind, spec, path, EngineOptions(**{option: value}))


def test_a_plugin_is_asked_for_by_name_or_claims_folders_before_ours_and_cannot_take_one_of_ours(
    install: Any, tmp_path: Path, opened: list[tuple[str, Path]]
) -> None:
    install(mlx=f"{__name__}:NAMED", toy=f"{__name__}:NAMED", zzz=f"{__name__}:AWQ")
    assert engine_names() == {"mlx", "toy", "zzz"}
    for spec, path in (("mlx:/a/b", "/a/b"), ("mlx", ".")):
        assert open_engine("mlx", spec, None, EngineOptions(num_threads=3)).name == f"{spec} at {path}, 3 threads"
    assert open_engine("toy", "toy", None, EngineOptions()).name == "toy"
    open_engine("folder", "f", tmp_path, EngineOptions())
    assert opened == [("TransformersEngine", tmp_path)]
    (tmp_path / "awq").touch()
    assert open_engine("folder", "f", tmp_path, EngineOptions()).name == f"f at {tmp_path}, 0 threads"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:KIND", "The engine bad (no_such_module:KIND) does not load (ModuleNotFoundError: No module"),
        (f"{__name__}:GONE", "does not load (AttributeError: "),
        ("loud_plugin:KIND", "does not load (RuntimeError: two). Reinstall its package"),
    ],
)
def test_a_broken_plugin_is_in_nobodys_way(
    value: str, message: str, install: Any, tmp_path: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud_plugin.py").write_text("raise RuntimeError('two\\nlines')")
    monkeypatch.syspath_prepend(tmp_path)
    install(bad=value)
    open_engine("folder", "f", tmp_path, EngineOptions())
    assert opened == [("TransformersEngine", tmp_path)]
    with pytest.raises(MissingDependency) as caught:
        open_engine("bad", "bad:x", None, EngineOptions())
    assert message in str(caught.value) and "\n" not in str(caught.value)


PLUGIN = """
from skydraft.engines.registry import EngineKind

def open_model(spec, path, options):
    from skydraft.engines.toy import random_toy, character_vocab
    return random_toy(character_vocab("我你他"), name=spec, context_len=options.context_len)

KIND = EngineKind("a model of the plug-in", open_model)
"""


def test_an_installed_package_brings_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip would put there: a module, and metadata with the entry point."""
    (tmp_path / "thrown_away_engine.py").write_text(PLUGIN)
    metadata = tmp_path / "thrown_away_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: thrown-away-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[skydraft.engines]\nthrown = thrown_away_engine:KIND\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert {"thrown", "toy"} <= engine_names()
        assert "thrown_away_engine" not in sys.modules, "a name alone must not cost an import"
        with open_engine("thrown", "thrown:x", None, EngineOptions(context_len=32)) as engine:
            assert (engine.name, engine.context_len) == ("thrown:x", 32)
            assert engine.open([0, 1]).extend([1]).shape == (1, engine.vocab.size)
        with pytest.raises(OptionError, match="dtype does not apply to thrown, which is a model of the plug-in"):
            open_engine("thrown", "thrown", None, EngineOptions(dtype="float16"))
    finally:
        sys.modules.pop("thrown_away_engine", None)
