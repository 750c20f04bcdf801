"""Which engine opens a model, by its file or folder."""

from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.engines.checkpoints.omni import OmniEngine
from skydraft.engines.checkpoints.text import TransformersEngine
from skydraft.engines.llama.engine import LlamaCppEngine
from skydraft.engines.options import EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError


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


@pytest.mark.parametrize(("config", "expected"), [
    ('{"model_type": "qwen2_5_omni", "thinker_config": {' + THINKER + "}", OMNI),
    ('{"model_type": "qwen2_5_omni_thinker", ' + THINKER, OMNI),
    ('{"model_type": "qwen2_5_omni_thinker", "audio_config": {}}', NO_OMNI),  # transformers would make up the rest
    ('{"model_type": "qwen2_5_omni", "thinker_config": null}', NO_OMNI), ('{"model_type": "qwen2"}', NO_OMNI),
    *((text, NO_OMNI) for text in ('{"model_type": []}', "", "[]", "{}", "\udcff")), (None, "LlamaCppEngine"),
])  # fmt: skip
def test_which_engine_opens(config: str | None, expected: str, tmp_path: Path, opened: list[tuple[str, Path]]) -> None:
    """A folder goes by its model type, and a file is for llama.cpp."""
    path = tmp_path
    if config is None:
        (path := tmp_path / "m.gguf").touch()
    else:
        (tmp_path / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    open_engine("a", path, EngineOptions())
    assert opened == [(expected, path)]


def test_a_model_is_closed_again_where_the_adapter_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = open_toy("toy")
    monkeypatch.setattr("skydraft.api.open_engine", lambda *_: toy)
    with pytest.raises(OptionError, match="has no adapter 'nobody'"):
        skydraft.load("toy", adapter="nobody")
    assert toy.floor.is_closed
