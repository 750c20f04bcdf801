"""An engine of each kind, and a target and a draft model for transformers, made once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.engines.base import Engine
from skydraft.engines.checkpoints.omni import OmniEngine
from skydraft.engines.checkpoints.text import TransformersEngine
from skydraft.engines.llama import engine as llamacpp
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.models import KNOWN, cache_dir, default_pair
from skydraft.models.cache import model_path

from ..later import later
from .contract import toy
from .tiny_checkpoint import OPTIONS, save_model, save_omni, to_gguf


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target's checkpoint and one that drafts for it, of one tokenizer."""
    target = save_model(tmp_path_factory.mktemp("target"), "Qwen2Config", seed=1)
    return target, save_model(tmp_path_factory.mktemp("draft"), "Qwen2Config", seed=2, like=target)


@pytest.fixture(scope="session")
def folder(folders: tuple[Path, Path]) -> Path:
    return folders[0]


@pytest.fixture(scope="session")
def target(folder: Path) -> TransformersEngine:
    return TransformersEngine(folder, OPTIONS, name="target")


@pytest.fixture(scope="session")
def omni_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_omni(tmp_path_factory.mktemp("omni"), seed=1)


@pytest.fixture(scope="session")
def omni(omni_folder: Path) -> OmniEngine:
    return OmniEngine(omni_folder, OPTIONS, name="omni")


@pytest.fixture(scope="session")
def thinker(omni_folder: Path) -> Any:
    """The weights of `omni` in the hands of transformers alone."""
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(omni_folder).eval()


@pytest.fixture(scope="session")
def gguf_path(home: Path) -> Path:
    """The demo pair's draft model, where it is on this machine."""
    later("llama_cpp")  # whose import would have llama.cpp print again
    path = model_path(KNOWN[default_pair().draft], cache_dir())
    if not path.is_file():
        pytest.skip(f"no model: {path} is missing")
    return path


Load = Callable[[], Engine]
KINDS = ["toy", "text", "omni", "grows", pytest.param("gguf", marks=[pytest.mark.model, pytest.mark.long])]


@pytest.fixture(scope="session")
def tiny_gguf(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    later("llama_cpp")
    later("gguf")
    return to_gguf(folder, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def small_places() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llamacpp, "_LEAST_LEN", 4)
        patch.setattr(llamacpp, "_AHEAD", 0)
        yield


@pytest.fixture(scope="module", params=KINDS)
def load(request: pytest.FixtureRequest) -> Load:
    """Loads an engine of each kind; `grows` goes from place to place, every few tokens."""
    options = EngineOptions(context_len=128, max_sequences=6, num_threads=1)
    needs = {"text": "folder", "omni": "omni_folder", "gguf": "gguf_path", "grows": "tiny_gguf small_places"}
    made, *_ = [*map(request.getfixturevalue, needs.get(request.param, "").split()), None]
    return {
        "toy": toy,
        "text": lambda: TransformersEngine(made, OPTIONS, name="text"),
        "omni": lambda: OmniEngine(made, OPTIONS, name="omni"),
        "grows": lambda: open_engine("qwen-tiny", made, replace(options, total_len=6 * 128)),
        "gguf": lambda: skydraft.load(default_pair().draft, options, offline=True),
    }[request.param]


@pytest.fixture(scope="module")
def engine(load: Load) -> Iterator[Engine]:
    with load() as engine:
        yield engine
