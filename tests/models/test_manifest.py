import pytest
from pydantic import ValidationError

from skydraft.models import KNOWN, default_pair
from skydraft.models.manifest import KnownModel, Part

from .published import publish


def test_the_packaged_models_are_whole() -> None:
    assert list(KNOWN) == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"] == [default_pair().draft, default_pair().target]
    wheels = [part.wheel for model in KNOWN.values() for part in model.parts]
    assert len(wheels) == len(set(wheels))
    for name, model in KNOWN.items():
        assert name == model.name and sum(part.bytes for part in model.parts) == model.bytes
        for part in model.parts:
            stem = part.package.replace("-", "_")
            assert part.wheel == f"{stem}-{part.version}-py3-none-any.whl" and part.member.startswith(f"{stem}/")


@pytest.mark.parametrize(("field", "values"), [
    ("sha256", ["ABC"]), ("file", ["../escape.gguf", ".hidden"]), ("mirror", ["x"]),
    *((field, ["../x", "a/b", "-r", ""]) for field in ("wheel", "package", "version")),
])  # fmt: skip
def test_a_wrong_model_does_not_parse_and_no_part_names_a_path_or_an_option(field: str, values: list[str]) -> None:
    model = publish().model
    kind, given = (Part, model.parts[0]) if field in Part.model_fields else (KnownModel, model)
    for value in values:
        with pytest.raises(ValidationError, match=field):
            kind.model_validate(given.model_dump() | {field: value})
