from __future__ import annotations

import pytest
from pydantic import ValidationError

from skydraft.errors import UnknownModel
from skydraft.models import default_pair, known_models
from skydraft.models.manifest import KnownModel, Part, known_model

from .published import publish


def test_the_packaged_models_are_whole() -> None:
    models, pair = known_models(), default_pair()
    assert list(models) == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"] == [pair.draft, pair.target]
    assert models[pair.draft].bytes < models[pair.target].bytes
    wheels = [part.wheel for model in models.values() for part in model.parts]
    assert len(wheels) == len(set(wheels)) == 28
    for name, model in models.items():
        assert name == model.name and sum(part.bytes for part in model.parts) == model.bytes
        for part in model.parts:
            stem = part.package.replace("-", "_")
            assert part.wheel == f"{stem}-{part.version}-py3-none-any.whl" and part.member.startswith(f"{stem}/")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"sha256": "ABC"}, "sha256"), ({"file": "../escape.gguf"}, "file"), ({"file": ".hidden"}, "file"),
        ({"mirror": "x"}, "Extra inputs"),
    ],
)  # fmt: skip
def test_a_wrong_model_does_not_parse(changed: dict[str, object], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        KnownModel.model_validate(publish().model.model_dump() | changed)


@pytest.mark.parametrize("field", ["wheel", "package", "version"])
def test_a_part_cannot_name_a_path_or_an_option(field: str) -> None:
    part = publish().model.parts[0].model_dump()
    for bad in ("../x", "a/b", "-r", ""):
        with pytest.raises(ValidationError, match=field):
            Part.model_validate(part | {field: bad})


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(UnknownModel, match=r"Did you mean qwen2\.5-coder-0\.5b\? Known: .*1\.5b"):
        known_model("Qwen2.5-coder-05b")
