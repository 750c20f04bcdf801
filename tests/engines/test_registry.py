"""Which engine opens a folder, and what is closed again."""

from pathlib import Path

import pytest

import skydraft
from skydraft.engines.checkpoints.engine import is_omni
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError

THINKER = '"audio_config": {}, "text_config": {}, "vision_config": {}}'


@pytest.mark.parametrize(("config", "expected"), [
    ('{"model_type": "qwen2_5_omni", "thinker_config": {' + THINKER + "}", True),
    ('{"model_type": "qwen2_5_omni_thinker", ' + THINKER, True),
    ('{"model_type": "qwen2_5_omni_thinker", "audio_config": {}}', False),  # transformers would make up the rest
    *((text, False) for text in ('{"model_type": "qwen2_5_omni", "thinker_config": null}', '{"model_type": []}', "[]")),
    ("", False), ("\udcff", False),
])  # fmt: skip
def test_a_thinker_is_known_by_its_config(config: str, expected: bool, tmp_path: Path) -> None:
    assert not is_omni(tmp_path)
    (tmp_path / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    assert is_omni(tmp_path) == expected


def test_a_model_is_closed_again_where_the_adapter_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = open_toy("toy")
    monkeypatch.setattr("skydraft.api.open_engine", lambda *_: toy)
    with pytest.raises(OptionError, match="has no adapter 'nobody'"):
        skydraft.load("toy", adapter="nobody")
    assert toy.lock.is_closed
