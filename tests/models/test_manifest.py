from __future__ import annotations

from importlib.resources import files

import pytest
from pydantic import ValidationError

from skydraft.errors import UnknownModel
from skydraft.models import default_pair, known_models
from skydraft.models.manifest import KnownModel, Manifest, Part, known_model

from .published import publish


def test_packaged_parts_add_up_and_are_named_once() -> None:
    models = known_models()
    assert set(models) == {"qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
    for model in models.values():
        assert sum(part.bytes for part in model.parts) == model.bytes
    wheels = [part.wheel for model in models.values() for part in model.parts]
    assert len(wheels) == len(set(wheels)) == 28


def test_packaged_wheel_names_fit_their_packages() -> None:
    for model in known_models().values():
        for part in model.parts:
            stem = part.package.replace("-", "_")
            assert part.wheel == f"{stem}-{part.version}-py3-none-any.whl"
            assert part.member.startswith(f"{stem}/")


def test_default_pair_is_small_drafts_for_large() -> None:
    pair = default_pair()
    assert (pair.draft, pair.target) == ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
    assert known_models()[pair.draft].bytes < known_models()[pair.target].bytes


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"bytes": 1}, "do not add up"), ({"sha256": "ABC"}, "sha256"), ({"file": "../escape.gguf"}, "file"),
        ({"file": ".hidden"}, "file"), ({"mirror": "x"}, "Extra inputs"),
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


def test_pairs_must_name_known_models() -> None:
    text = (files("skydraft.models") / "known_models.json").read_text()
    wrong = text.replace('"draft": "qwen2.5-coder-0.5b"', '"draft": "gone"')
    assert wrong != text
    with pytest.raises(ValidationError, match="names gone"):
        Manifest.model_validate_json(wrong)
    with pytest.raises(ValidationError, match="default pair other"):
        Manifest.model_validate_json(text.replace('"default_pair": "qwen2.5-coder"', '"default_pair": "other"'))
    with pytest.raises(ValidationError):
        Manifest.model_validate_json("{}")


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(UnknownModel, match=r"Did you mean qwen2\.5-coder-0\.5b\? Known: .*1\.5b") as raised:
        known_model("Qwen2.5-coder-05b", known_models())
    assert "\n" not in str(raised.value)
