"""The chance that the target disagrees with a drafted token, by its top probability.

A `Calibration` also has the agreement that each limit on a block's risk keeps, for a calibrated gate.
`skydraft calibrate` makes one for a pair; the demo pair's calibration is shipped.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field

from skydraft.characters import from_json
from skydraft.errors import OptionError, RecordsError, telling
from skydraft.files import Stored, read_file
from skydraft.gating.hand_back import HandBack
from skydraft.types import Signals, is_named, named_weights

MAX_BLOCK = 12  # drafted tokens; longer blocks save next to no call (NOTES.md)
_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99)  # of the top probability
BIN_MIDDLES = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
NUM_BINS = len(BIN_MIDDLES)
_SHIPPED = Path(__file__).with_name("calibrations")
_MAKE_ONE = "Make one with: skydraft calibrate --prompts FILE --edge-model X --cloud-model Y"


class PairSide(Stored):
    name: str = Field(min_length=1)
    fingerprint: str = Field(min_length=1)


class CurvePoint(Stored):
    """The agreement that a limit on a block's risk gave on the fitted prompts, and the target's share of the work."""

    model_config = ConfigDict(extra="ignore")  # earlier versions wrote more fields

    limit: float = Field(ge=0)
    agreement: float = Field(ge=0, le=1)
    calls_per_token: float = Field(ge=0)
    written_per_token: float = Field(default=0.0, ge=0)


class Curve(Stored):
    """The points for blocks of up to `k` tokens with this hand-back, limits rising."""

    k: int = Field(ge=1)
    hand_back: str = "0"
    points: tuple[CurvePoint, ...] = Field(min_length=2)

    def model_post_init(self, context: object) -> None:
        limits = [point.limit for point in self.points]
        agreements = [point.agreement for point in self.points]
        if limits != sorted(limits) or agreements != sorted(agreements, reverse=True):
            raise ValueError("the curve does not run from a low limit and a high agreement to the opposite")

    def limit(self, agreement: float) -> float | None:
        """Return the loosest limit that keeps this agreement; None if no limit keeps it. If the draft model alone
        reaches the agreement, it is the last limit of the curve."""
        if agreement <= self.points[-1].agreement:
            return self.points[-1].limit
        if not agreement <= self.points[0].agreement:  # also refuses NaN
            return None
        index = max(index for index, point in enumerate(self.points) if point.agreement >= agreement)
        here, beyond = self.points[index], self.points[index + 1]
        part = (here.agreement - agreement) / (here.agreement - beyond.agreement)
        return here.limit + part * (beyond.limit - here.limit)


class Calibration(Stored):
    """`risks` are the chances that the target disagrees with a token, by bins of its top probability.

    The risk of a block is the sum over its tokens: the expected number of disagreements if it is skipped. `curves` give
    the agreement that each limit on that risk kept, for several k and hand-backs. `fitted` documents the source for
    readers of the file.
    """

    kind: Literal["skydraft-calibration"] = "skydraft-calibration"
    schema_number: Literal[3] = Field(default=3, alias="schema")
    draft: PairSide
    target: PairSide
    risks: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(min_length=NUM_BINS, max_length=NUM_BINS)
    curves: tuple[Curve, ...] = Field(min_length=1)
    fitted: dict[str, str | int]

    def curve(self, k: int, hand_back: HandBack) -> Curve:
        """Return the curve for blocks of up to `k` tokens: the next shorter k's, which is stricter, or the first.

        A hand-back without a curve uses the curves of "0": the same limit keeps more if the target keeps writing.
        """
        for name in (str(hand_back), "0"):
            if shorter := [curve for curve in self.curves if curve.hand_back == name and curve.k <= k]:
                return max(shorter, key=lambda curve: curve.k)
        return min(self.curves, key=lambda curve: curve.k)

    def limit(self, agreement: float, k: int, hand_back: HandBack) -> float:
        """Return the limit on a block's risk that kept this agreement. Raises OptionError if none did."""
        curve = self.curve(k, hand_back)
        if (limit := curve.limit(agreement)) is None:
            names, highest = f"{self.draft.name} and {self.target.name}", curve.points[0].agreement
            says = f"The calibration for {names} reaches an agreement of up to {highest:.2f}, not {agreement:g}."
            raise OptionError(says, hint="For the target's own text use --mode lossless.")
        return limit

    def risk(self, signals: Iterable[Signals]) -> float:
        return sum(risks_of(self.risks, signals))

    def fits(self, draft: str, target: str | None) -> bool:
        """Whether it was made for models with these fingerprints, or this target name. None stands for any target."""
        known = (None, self.target.fingerprint, named_weights(self.target.name))
        return self.draft.fingerprint == draft and target in known


def read_calibration(path: Path) -> Calibration:
    with telling(RecordsError, f"The calibration {path} cannot be read", "Make one with skydraft calibrate."):
        return Calibration.model_validate(from_json(read_file(path)))


@lru_cache(maxsize=64)
def _read_as_of(path: Path, mtime_ns: int, inode: int) -> Calibration:
    """Cached `read_calibration`, which takes 8 ms; each text looks at all calibrations."""
    return read_calibration(path)


def find_calibration(
    folders: Iterable[Path], draft: str, target: str | None, names: str, given: Calibration | None = None
) -> Calibration:
    """Return the calibration of a pair called `names`: the `given` one, else from `folders` or the package. A match of
    the target's fingerprint is preferred to its name. Raises OptionError if none fits."""
    if given and given.fits(draft, target):
        return given
    if given:
        own, why = f"{given.draft.name} and {given.target.name}", "because the models or their weights differ"
        says = f"This calibration was made for {own}; it does not fit {names}, {why}."
        raise OptionError(says, hint=f"{_how_to_make(target)}.")
    broken: RecordsError | None = None
    found = list[Calibration]()
    for path in (path for folder in (*folders, _SHIPPED) for path in sorted(folder.glob("*.json"))):
        try:
            found.append(_read_as_of(path, path.stat().st_mtime_ns, path.stat().st_ino))
        except FileNotFoundError:  # removed meanwhile
            continue
        except RecordsError as error:
            broken = error  # it may belong to another pair
    if fitting := [each for each in found if each.fits(draft, target)]:
        return min(fitting, key=lambda each: target not in (None, each.target.fingerprint))
    if broken:
        raise broken
    hint = f"{_how_to_make(target)}, or use --mode quality."
    known = sorted({each.target.name for each in found if each.draft.fingerprint == draft})
    if known and target and is_named(target):
        hint += f" If the server runs {' or '.join(known)}, start it under that name."
    raise OptionError(f"There is no calibration for {names}.", hint=hint)


def _how_to_make(target: str | None) -> str:
    # `calibrate` needs the target's weights here; on a server without skydraft they are not.
    at_server = "Collect answers with: skydraft generate --learn DIR, then run: skydraft learn calibrate DIR"
    return at_server if target is not None and is_named(target) else _MAKE_ONE


def bin_of(signals: Signals) -> int:
    """Return the bin of a token by its top probability: entropy and margin add nothing (NOTES.md)."""
    return bisect(_EDGES, signals.top_prob)


def risks_of(risks: Sequence[float], signals: Iterable[Signals]) -> list[float]:
    """Return the chance that the target disagrees with each token, interpolated between the middles of the bins."""
    found: list[float] = np.interp([token.top_prob for token in signals], BIN_MIDDLES, risks).tolist()
    return found
