"""A target and a draft model for transformers, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skydraft.engines.transformers_omni import OmniEngine
from skydraft.engines.transformers_text import TransformersEngine

from .tiny_checkpoint import OPTIONS, save_model
from .tiny_omni import save_omni


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> tuple[Path, Path]:
    """A target's checkpoint and one that drafts for it, of one tokenizer."""
    target = save_model(tmp_path_factory.mktemp("target"), "Qwen2Config", seed=1)
    return target, save_model(tmp_path_factory.mktemp("draft"), "Qwen2Config", seed=2, like=target)


@pytest.fixture(scope="session")
def target(folders: tuple[Path, Path]) -> TransformersEngine:
    return TransformersEngine(folders[0], OPTIONS, name="target")


@pytest.fixture(scope="session")
def draft(folders: tuple[Path, Path]) -> TransformersEngine:
    return TransformersEngine(folders[1], OPTIONS, name="draft")


@pytest.fixture(scope="session")
def omni_folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    return save_omni(tmp_path_factory.mktemp("omni"), seed=1)


@pytest.fixture(scope="session")
def omni(omni_folder: Path) -> OmniEngine:
    return OmniEngine(omni_folder, OPTIONS, name="omni")


@pytest.fixture(scope="session")
def thinker(omni_folder: Path) -> Any:
    """The weights of `omni` in the hands of transformers alone."""
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(omni_folder).eval()
