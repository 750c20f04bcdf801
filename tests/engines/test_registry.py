"""Engines as plug-ins: a line in a pyproject.toml and one module, whole, broken, or not there."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
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

OURS = {
    "toy": "skydraft.engines.toy:KIND",
    "gguf": "skydraft.engines.llamacpp:KIND",
    "checkpoint": "skydraft.engines.transformers_text:KIND",
    "omni": "skydraft.engines.transformers_omni:KIND",
}


def open_named(spec: str, path: Path, options: EngineOptions) -> ToyEngine:
    engine = open_toy("toy")
    engine.name = f"{spec} at {path}, {options.num_threads} threads"
    return engine


NAMED = EngineKind("a model of ours", open_named, takes=frozenset({"num_threads"}))
AWQ = EngineKind("an AWQ checkpoint", open_named, claims=lambda path: (path / "awq").exists())
WILD = EngineKind("anything", open_named, claims=lambda path: 1 / 0)  # type: ignore[arg-type]
NO_KIND = 3


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes these the only installed engines, by name and value."""

    def replace(**values: str) -> None:
        points = [EntryPoint(name, value, "skydraft.engines") for name, value in values.items()]
        others = [EntryPoint("script", "nothing:here", "console_scripts")]
        monkeypatch.setattr(registry, "distributions", lambda: [SimpleNamespace(entry_points=points + others)])

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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    return tmp_path


def here(kind: str) -> str:
    return f"{__name__}:{kind}"


def test_our_engines_are_installed_like_any_other() -> None:
    installed = entry_points(group="skydraft.engines")
    assert OURS.items() <= {entry.name: entry.value for entry in installed}.items()
    assert "toy" in engine_names() and not {"gguf", "checkpoint", "omni"} & engine_names()


@pytest.mark.parametrize(
    "text",
    [*(f'{{"model_type": {kind}}}' for kind in ('"qwen2_5_omni"', '"qwen2_5_omni_thinker"', '"qwen2"', "null", "[]")),
     "", "[]", "{}", "\udcff"],
)  # fmt: skip
def test_a_folder_goes_by_its_model_type(text: str, tmp_path: Path, opened: list[tuple[str, Path]]) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    open_engine("folder", "a", tmp_path, EngineOptions())
    assert opened == [("OmniEngine" if "omni" in text else "TransformersEngine", tmp_path)]


def test_a_file_is_for_llama_cpp(tmp_path: Path, opened: list[tuple[str, Path]]) -> None:
    (tmp_path / "m.gguf").touch()
    open_engine("gguf", "a", tmp_path / "m.gguf", EngineOptions())
    assert opened == [("LlamaCppEngine", tmp_path / "m.gguf")]
    with pytest.raises(BrokenModel, match="No engine opens a"):
        open_engine("gguf", "a", tmp_path / "gone.gguf", EngineOptions())


@pytest.mark.parametrize(
    ("kind", "option", "value", "message"),
    [
        ("toy", "num_threads", 2, "threads does not apply to toy:x, which is a toy. Remove threads."),
        ("toy", "gpu_layers", -1, "gpu_layers does not apply to toy:x, which is a toy"),
        ("gguf", "quantization", "8bit", "quantization does not apply to m.gguf, which is a GGUF model"),
        ("gguf", "device", "cuda", "device does not apply to m.gguf"),
        ("folder", "gpu_layers", 1, "gpu_layers does not apply to f, which is a transformers checkpoint"),
    ],
)
def test_an_option_that_does_not_apply(kind: str, option: str, value: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    spec, path = {"toy": ("toy:x", None), "gguf": ("m.gguf", tmp_path / "m.gguf"), "folder": ("f", tmp_path)}[kind]
    with pytest.raises(OptionError, match=message):
        open_engine(kind, spec, path, EngineOptions(**{option: value}))


def test_what_every_engine_takes(tmp_path: Path) -> None:
    path = tmp_path / "p"
    options = EngineOptions(context_len=99, max_sequences=2, shared_cache=True, profile_path=path, probe_again=True)
    assert open_engine("toy", "toy", None, options).context_len == 99


def test_old_metadata_say_how_to_be_renewed(install: Any) -> None:
    install(mlx=here("NAMED"))
    for use in (engine_names, lambda: open_engine("toy", "toy", None, EngineOptions())):
        with pytest.raises(MissingDependency, match=r"pip install -e \.$") as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("spec", "path"), [("mlx:/a/b", "/a/b"), ("mlx:org/name", "org/name"), ("mlx", ".")])
def test_a_plugin_is_asked_for_by_name(spec: str, path: str, install: Any) -> None:
    install(mlx=here("NAMED"), **OURS)
    assert engine_names() == {"mlx", "toy"}
    engine = open_engine("mlx", spec, None, EngineOptions(num_threads=3))
    assert engine.name == f"{spec} at {path}, 3 threads"
    with pytest.raises(OptionError, match=f"device does not apply to {spec}, which is a model of ours"):
        open_engine("mlx", spec, None, EngineOptions(device="cuda"))


def test_a_plugin_may_claim_folders_before_ours(install: Any, checkpoint: Path, opened: list[tuple[str, Path]]) -> None:
    install(**OURS, zzz=here("AWQ"))
    open_engine("folder", "f", checkpoint, EngineOptions())
    assert opened == [("TransformersEngine", checkpoint)]
    (checkpoint / "awq").touch()
    assert open_engine("folder", "f", checkpoint, EngineOptions()).name == f"f at {checkpoint}, 0 threads"
    assert engine_names() == {"toy", "zzz"}


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_of_ours_stays_ours(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("toy", value, "skydraft.engines") for value in (here("NAMED"), OURS["toy"])][::order]
    monkeypatch.setattr(registry, "distributions", lambda: [SimpleNamespace(entry_points=points)])
    assert open_engine("toy", "toy", None, EngineOptions()).name == "toy"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:KIND", "The engine bad (no_such_module:KIND) does not load (ModuleNotFoundError: No module"),
        (here("GONE"), "does not load (AttributeError: "),
        ("loud_plugin:KIND", "does not load (RuntimeError: two). Reinstall its package"),
        (here("NO_KIND"), "is not an EngineKind"),
        (here("WILD"), ""),
    ],
)
def test_a_broken_plugin_is_in_nobodys_way(
    value: str, message: str, install: Any, checkpoint: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "loud_plugin.py").write_text("raise RuntimeError('two\\nlines')")
    monkeypatch.syspath_prepend(checkpoint)
    install(bad=value, **OURS)
    assert engine_names() == {"bad", "toy"}
    assert open_engine("toy", "toy", None, EngineOptions()).name == "toy"
    open_engine("folder", "f", checkpoint, EngineOptions())
    assert opened == [("TransformersEngine", checkpoint)]
    if message:
        with pytest.raises(MissingDependency) as caught:
            open_engine("bad", "bad:x", None, EngineOptions())
        assert message in str(caught.value) and "bad" in str(caught.value) and "\n" not in str(caught.value)


def test_a_broken_engine_of_ours_is_not_passed_over(install: Any, checkpoint: Path) -> None:
    install(**{**OURS, "omni": "skydraft.engines.gone:KIND"})
    with pytest.raises(MissingDependency, match="engine omni"):
        open_engine("folder", "f", checkpoint, EngineOptions())


def test_a_kind_names_options_that_there_are() -> None:
    with pytest.raises(ValueError, match="EngineOptions has no threads"):
        EngineKind("a model", open_named, takes=frozenset({"threads", "device"}))


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
    assert "thrown" not in engine_names()
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
