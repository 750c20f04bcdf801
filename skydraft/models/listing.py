"""What is in our cache, and whether it still is what was published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skydraft.errors import HashMismatch, UnknownModel
from skydraft.models.cache import is_present, model_path, sha256_of
from skydraft.models.manifest import KnownModel, known_model, known_models


@dataclass(frozen=True, slots=True)
class Installed:
    """One row of `skydraft models list`; `bytes` is the size of the published file, present or not."""

    name: str
    present: bool
    bytes: int
    path: Path
    license: str


def installed(cache: Path, models: Mapping[str, KnownModel] | None = None) -> tuple[Installed, ...]:
    """One row for each known model; looks at sizes only."""
    known = known_models() if models is None else models
    return tuple(
        Installed(model.name, is_present(model, cache), model.bytes, model_path(model, cache), model.license)
        for model in known.values()
    )


def present_path(name: str, cache: Path, models: Mapping[str, KnownModel] | None = None) -> Path:
    """The file of a known model; looks at its size only. Raises UnknownModel if it is not known or not here."""
    model = known_model(name, known_models() if models is None else models)
    if not is_present(model, cache):
        raise UnknownModel(f"{name} is not on this machine.", hint=f"Run `skydraft models fetch {name}`.")
    return model_path(model, cache)


def verify(path: Path, models: Mapping[str, KnownModel] | None = None) -> None:
    """Hash a known model's file again; the model is told by the file's name.

    Changes nothing. Raises UnknownModel if there is no such file or no known model has that name,
    HashMismatch if it is not the published file.
    """
    known = known_models() if models is None else models
    model = next((model for model in known.values() if model.file == path.name), None)
    if model is None:
        raise UnknownModel(f"No published hash is known for {path.name}.", hint="Run `skydraft models list`.")
    if not path.is_file():
        raise UnknownModel(f"There is no file {path}.", hint=f"Run `skydraft models fetch {model.name}`.")
    if sha256_of(path) != model.sha256:
        raise HashMismatch(
            f"{path} is not the published file.", hint=f"Remove it, then run `skydraft models fetch {model.name}`."
        )
