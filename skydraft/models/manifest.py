"""The models that skydraft knows by name, from `known_models.json` beside this file."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated

from pydantic import Field, PositiveInt

from skydraft.errors import UnknownModel
from skydraft.files import Stored

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Names become file names in our cache: no separator, no leading dot or dash.
PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]


class Part(Stored):
    """One piece of a model file: `bytes` bytes, stored as `member` of a wheel."""

    package: PlainName
    version: PlainName
    wheel: PlainName
    wheel_sha256: Sha256
    member: str
    bytes: PositiveInt


class KnownModel(Stored):
    """One published file, and its parts in order."""

    name: PlainName
    file: PlainName
    license: str
    hub_repo: str
    bytes: PositiveInt
    sha256: Sha256
    parts: tuple[Part, ...]


class KnownPair(Stored):
    draft: str
    target: str


class _Manifest(Stored):
    note: str
    default_pair: KnownPair
    models: Mapping[str, KnownModel]


_MANIFEST = _Manifest.model_validate_json((files(__package__) / "known_models.json").read_bytes())
KNOWN: Mapping[str, KnownModel] = MappingProxyType(dict(_MANIFEST.models))


def known_model(name: str) -> KnownModel:
    """Return the model of that name. Raises UnknownModel with all names and the nearest one."""
    if name not in KNOWN:
        raise UnknownModel(f"There is no known model {name!r}.", hint=name_hint(name))
    return KNOWN[name]


def name_hint(name: str) -> str:
    listed = f"Known: {', '.join(KNOWN)}."
    nearest = get_close_matches(name.lower(), KNOWN, n=1)
    return f"Did you mean {nearest[0]}? {listed}" if nearest else listed


def default_pair() -> KnownPair:
    return _MANIFEST.default_pair
