"""Which engine opens a model: ours by file and folder, plug-ins by name or because they claim it, whole or broken."""

from pathlib import Path
from typing import Any

import pytest

import skydraft
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


NAMED = EngineKind(open_named)
AWQ = EngineKind(open_named, claims=lambda path: (path / "awq").exists())


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts there what pip would for a package with these plug-ins, by name and value."""

    def install(**values: str) -> None:
        metadata = tmp_path / "site" / "thrown_away-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: thrown-away\nVersion: 1.0\n")
        lines = [f"{name} = {value}\n" for name, value in values.items()]
        (metadata / "entry_points.txt").write_text("".join(["[skydraft.engines]\n", *lines]))
        monkeypatch.syspath_prepend(tmp_path / "site")

    return install


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
def test_a_broken_plugin_hinders_nobody(
    value: str, message: str, install: Any, tmp_path: Path, opened: list[Any]
) -> None:
    install(bad=value)
    (tmp_path / "site" / "loud_plugin.py").write_text("raise RuntimeError('two\\nlines')")
    assert "bad" in engine_names(), "a name alone must not cost an import"
    open_engine("folder", "f", tmp_path, EngineOptions())
    assert opened == [("TransformersEngine", tmp_path)]
    with pytest.raises(MissingDependency) as caught:
        open_engine("bad", "bad:x", None, EngineOptions())
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_is_closed_again_where_the_adapter_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = open_toy("toy")
    monkeypatch.setattr("skydraft.api.open_engine", lambda *_: toy)
    with pytest.raises(OptionError, match="has no adapter 'nobody'"):
        skydraft.load("toy", adapter="nobody")
    assert toy.floor.is_closed
