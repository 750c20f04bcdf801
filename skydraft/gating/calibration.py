"""A calibration: how likely the target disagrees with a drafted token, and which limit keeps which agreement.

Made by `skydraft calibrate` for one pair of models, shipped for the demo pair.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skydraft.errors import OptionError, RecordsError
from skydraft.types import Signals

SCHEMA = 1
FEATURES = ("entropy", "log_entropy", "margin", "log_odds")
MAX_BLOCK = 12  # drafted tokens; longer blocks save next to no call (NOTES.md)


def features(signals: Signals) -> tuple[float, ...]:
    """What the risk of a token is computed from, in the order of FEATURES."""
    top = min(max(signals.top_prob, 1e-9), 1 - 1e-6)
    return (signals.entropy, math.log(signals.entropy + 1e-3), signals.margin, math.log(top / (1 - top)))


def risk(weights: Sequence[float], bias: float, signals: Signals) -> float:
    """1 / (1 + exp(−(bias + weights · features)))."""
    score = bias + sum(w * x for w, x in zip(weights, features(signals), strict=True))
    return 1 / (1 + math.exp(-min(max(score, -50.0), 50.0)))


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PairSide(_Value):
    """A model that the calibration was made with."""

    name: str
    fingerprint: str


class CurvePoint(_Value):
    """What a limit on the risk of a block gave on the prompts that were fitted."""

    limit: float = Field(ge=0)
    agreement: float = Field(ge=0, le=1)
    calls_per_token: float = Field(ge=0)


class Curve(_Value):
    """What limits gave for blocks of up to `k` tokens, from the lowest limit to the highest."""

    k: int = Field(ge=1)
    points: tuple[CurvePoint, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Curve:
        limits = [point.limit for point in self.points]
        agreements = [point.agreement for point in self.points]
        if limits != sorted(limits) or agreements != sorted(agreements, reverse=True):
            raise ValueError("the curve does not run from a low limit and a high agreement to the opposite")
        return self

    def limit(self, agreement: float) -> float | None:
        """The loosest limit that keeps this agreement; None where none does.

        For one that the draft model reaches alone it is the limit at which no call was made.
        """
        if agreement <= self.points[-1].agreement:
            return self.points[-1].limit
        if not agreement <= self.points[0].agreement:  # also refuses NaN
            return None
        index = max(index for index, point in enumerate(self.points) if point.agreement >= agreement)
        here, beyond = self.points[index], self.points[index + 1]
        part = (here.agreement - agreement) / (here.agreement - beyond.agreement)
        return here.limit + part * (beyond.limit - here.limit)


class Fitted(_Value):
    """What the calibration was made from."""

    workload: str
    sha256: str
    num_prompts: int
    num_tokens: int
    date: str
    max_new_tokens: int
    auroc: float


class Calibration(_Value):
    """The chance that the target disagrees with a drafted token is 1 / (1 + exp(−(bias + weights · features))).

    The risk of a block is the sum over its tokens: how many disagreements skipping it is expected to leave in the
    text. `curves` say which agreement a limit on that risk gave: short blocks gather less of it than long ones, so
    there is one for each of several k.
    """

    kind: Literal["skydraft-calibration"] = "skydraft-calibration"
    schema_number: Literal[1] = Field(default=1, alias="schema")
    draft: PairSide
    target: PairSide
    features: tuple[str, ...]
    weights: tuple[float, ...]
    bias: float
    curves: tuple[Curve, ...] = Field(min_length=1)
    fitted: Fitted

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        if self.features != FEATURES or len(self.weights) != len(FEATURES):
            raise ValueError(f"the features are not {', '.join(FEATURES)}")
        if [curve.k for curve in self.curves] != sorted({curve.k for curve in self.curves}):
            raise ValueError("the curves are not in the order of their k")
        return self

    def curve(self, k: int) -> Curve:
        """The curve for blocks of up to `k` tokens: that of the next shorter k, which is stricter, or the first."""
        return max((curve for curve in self.curves if curve.k <= k), key=lambda curve: curve.k, default=self.curves[0])

    def risk(self, signals: Signals) -> float:
        """The chance that the target disagrees with one token."""
        return risk(self.weights, self.bias, signals)

    def limit(self, agreement: float, k: int) -> float:
        """The limit on the risk of a block of up to `k` tokens that kept this agreement.

        Raises OptionError for one that no skipping keeps.
        """
        curve = self.curve(k)
        if (limit := curve.limit(agreement)) is None:
            raise OptionError(
                f"The calibration for {self.draft.name} and {self.target.name} reaches an agreement of up to "
                f"{curve.points[0].agreement:.2f}, not {agreement:g}.",
                hint="For the target's own text use --mode lossless.",
            )
        return limit

    def fits(self, draft: str, target: str | None) -> bool:
        """Whether it was made with models of these fingerprints; None where the target cannot be asked for its own."""
        return self.draft.fingerprint == draft and target in (None, self.target.fingerprint)


def read_calibration(path: Path) -> Calibration:
    """A calibration from its file. Raises RecordsError."""
    try:
        return _parse(str(path), path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise RecordsError(f"The calibration {path} cannot be read: {reason}.") from error


def _parse(name: str, text: str) -> Calibration:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordsError(
            f"The calibration {name} is not JSON: {error.msg}.", hint="Make it again with: skydraft calibrate."
        ) from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise RecordsError(f"The calibration {name} has schema {schema}; this version reads up to {SCHEMA}.")
    try:
        return Calibration.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise RecordsError(f"{name} is not a calibration: {where}: {first['msg']}.") from error


def find_calibration(folders: Iterable[Path], draft: str, target: str | None, names: str) -> Calibration:
    """The calibration of a pair, from `folders` or shipped; `names` is for the message. Raises OptionError."""
    broken: RecordsError | None = None
    for read in _all(folders):
        try:
            if (calibration := read()).fits(draft, target):
                return calibration
        except RecordsError as error:
            broken = error  # of another pair, perhaps
    if broken:
        raise broken
    raise OptionError(
        f"There is no calibration for {names}.",
        hint="Make one with: skydraft calibrate --prompts FILE --edge-model X --cloud-model Y, or use --mode quality.",
    )


def _all(folders: Iterable[Path]) -> Iterator[Callable[[], Calibration]]:
    for folder in folders:
        yield from (partial(read_calibration, path) for path in sorted(folder.glob("*.json")))
    for entry in resources.files("skydraft.gating").joinpath("calibrations").iterdir():
        if entry.name.endswith(".json"):
            yield partial(_parse, entry.name, entry.read_text(encoding="utf-8"))


def check_fits(calibration: Calibration, draft: str, target: str | None, names: str) -> None:
    """Raise OptionError unless the calibration was made with these models."""
    if not calibration.fits(draft, target):
        raise OptionError(
            f"This calibration was made for {calibration.draft.name} and {calibration.target.name}; it does not fit "
            f"{names}, because the models or their weights differ.",
            hint="Make one with: skydraft calibrate --prompts FILE --edge-model X --cloud-model Y.",
        )
