"""The chance that the target disagrees with a drafted token, by its top probability: for a pair, or from verdicts.

A `Calibration` also has the agreement that each limit on the risk of a block keeps, which a calibrated gate uses.
`skydraft calibrate` makes one for a pair; that of the demo pair is shipped. `decoding/block_length.py` ends
blocks by a `LearnedRisk`: it changes how many tokens are drafted, never the text.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skydraft.characters import from_json
from skydraft.errors import OptionError, RecordsError, first_fault
from skydraft.files import read_file
from skydraft.gating.hand_back import HandBack
from skydraft.types import Signals, is_named, named_weights

SCHEMA: Literal[3] = 3
MAX_BLOCK = 12  # drafted tokens; longer blocks save next to no call (NOTES.md)
_PRIOR = 4.0  # judged tokens of a bin, by which the first guess outweighs one text
_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99)  # of the top probability
_MEMORY = 400.0  # judged tokens in a bin; older ones fade, since a text may change its kind
_MIDDLES = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
NUM_BINS = len(_MIDDLES)
_SHIPPED = Path(__file__).with_name("calibrations")
_MAKE_ONE = "Make one with: skydraft calibrate --prompts FILE --edge-model X --cloud-model Y"


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PairSide(_Value):
    name: str = Field(min_length=1)
    fingerprint: str = Field(min_length=1)


class CurvePoint(_Value):
    """What a limit on the risk of a block gave on the fitted prompts: the agreement, and per token what it took.

    That is calls, tokens that the target wrote itself, rows that it computed, and drafted tokens.
    """

    limit: float = Field(ge=0)
    agreement: float = Field(ge=0, le=1)
    calls_per_token: float = Field(ge=0)
    written_per_token: float = Field(default=0.0, ge=0)
    rows_per_token: float = Field(default=0.0, ge=0)
    drafted_per_token: float = Field(default=0.0, ge=0)


class Curve(_Value):
    """The points of blocks of up to `k` tokens with this hand-back, from the lowest limit to the highest."""

    k: int = Field(ge=1)
    hand_back: str = "0"
    points: tuple[CurvePoint, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _check(self) -> Curve:
        limits = [point.limit for point in self.points]
        agreements = [point.agreement for point in self.points]
        if limits != sorted(limits) or agreements != sorted(agreements, reverse=True):
            raise ValueError("the curve does not run from a low limit and a high agreement to the opposite")
        return self

    def limit(self, agreement: float) -> float | None:
        """The loosest limit that keeps this agreement; None if no limit keeps it.

        If the draft model alone reaches the agreement, it is the limit at which no call was made.
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
    workload: str
    sha256: str
    num_prompts: int
    num_tokens: int
    date: str
    max_new_tokens: int


class Calibration(_Value):
    """`risks` are the chances that the target disagrees with a token, by bins of its top probability.

    The risk of a block is the sum over its tokens: the number of disagreements to expect from skipping it. `curves`
    give the agreement that each limit on that risk kept. Short blocks have less risk than long ones, and where the
    target writes on after a correction less is left to skip, so there is a curve for each of several k and hand-backs.
    """

    kind: Literal["skydraft-calibration"] = "skydraft-calibration"
    schema_number: Literal[3] = Field(default=SCHEMA, alias="schema")
    draft: PairSide
    target: PairSide
    risks: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(min_length=NUM_BINS, max_length=NUM_BINS)
    curves: tuple[Curve, ...] = Field(min_length=1)
    fitted: Fitted

    @property
    def hand_backs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(curve.hand_back for curve in self.curves))

    def curve(self, k: int, hand_back: HandBack) -> Curve:
        """The curve for blocks of up to `k` tokens: that of the next shorter k, which is stricter, or the first.

        A hand-back without such a curve takes those without one: where the target writes on, the same limit keeps more.
        """
        for name in (str(hand_back), "0"):
            if shorter := [curve for curve in self.curves if curve.hand_back == name and curve.k <= k]:
                return max(shorter, key=lambda curve: curve.k)
        return min(self.curves, key=lambda curve: curve.k)

    def limit(self, agreement: float, k: int, hand_back: HandBack) -> float:
        """The limit on the risk of a block of up to `k` tokens that kept this agreement.

        Raises OptionError if no limit keeps it.
        """
        curve = self.curve(k, hand_back)
        if (limit := curve.limit(agreement)) is None:
            raise OptionError(
                f"The calibration for {self.draft.name} and {self.target.name} reaches an agreement of up to "
                f"{curve.points[0].agreement:.2f}, not {agreement:g}.",
                hint="For the target's own text use --mode lossless.",
            )
        return limit

    def gate_test(self, agreement: float, k: int, hand_back: HandBack) -> Callable[[Sequence[Signals]], bool]:
        """Whether the risk of a block is above the limit for this agreement. Raises OptionError as `limit` does."""
        limit = self.limit(agreement, k, hand_back)
        return lambda signals: self.risk(signals) > limit

    def risk(self, signals: Iterable[Signals]) -> float:
        return sum(risks_of(self.risks, signals))

    def fits(self, draft: str, target: str | None) -> bool:
        """Whether it was made with models of these fingerprints; `target` None stands for any target.

        Of a target that is known by its name alone (`named_weights`) the whole name must be that of the model here.
        """
        known = (None, self.target.fingerprint, named_weights(self.target.name))
        return self.draft.fingerprint == draft and target in known


def read_calibration(path: Path) -> Calibration:
    """A calibration from its file. Raises RecordsError."""
    hint = "Make one with skydraft calibrate."
    try:
        parsed = from_json(read_file(path).decode())
        schema = parsed.get("schema") if isinstance(parsed, dict) else None
        if isinstance(schema, int) and schema != SCHEMA:
            raise RecordsError(
                f"The calibration {path} has schema {schema}; this version reads {SCHEMA}.",
                hint=f"{'Update skydraft, or make' if schema > SCHEMA else 'Make'} it again with: skydraft calibrate.",
            )
        return Calibration.model_validate(parsed)
    except OSError as error:
        raise RecordsError(f"The calibration {path} cannot be read: {error.strerror}.", hint=hint) from error
    except ValidationError as error:
        raise RecordsError(f"{path} is not a calibration: {first_fault(error)}.", hint=hint) from error
    except ValueError as error:
        raise RecordsError(f"The calibration {path} is not JSON: {error}.", hint=hint) from error


def find_calibration(
    folders: Iterable[Path], draft: str, target: str | None, names: str, given: Calibration | None = None
) -> Calibration:
    """The calibration of a pair: the `given` one, else from `folders` or shipped; `names` is for the message.

    One that was made with exactly this target goes before one that only has its name. Raises OptionError if none fits.
    """
    if given:
        _check_fits(given, draft, target, names)
        return given
    broken: RecordsError | None = None
    namesake: Calibration | None = None
    for path in (path for folder in (*folders, _SHIPPED) for path in sorted(folder.glob("*.json"))):
        try:
            calibration = read_calibration(path)
        except RecordsError as error:
            broken = error  # it may be of another pair
            continue
        if calibration.fits(draft, target):
            if target in (None, calibration.target.fingerprint):
                return calibration
            namesake = namesake or calibration
    if namesake:
        return namesake
    if broken:
        raise broken
    raise OptionError(f"There is no calibration for {names}.", hint=f"{_way_to_make(target)}, or use --mode quality.")


def _way_to_make(target: str | None) -> str:
    """How a calibration for a target is made; a model on a server without skydraft gives no texts to `calibrate`."""
    at_server = "Collect answers with --learn DIR and run: skydraft learn calibrate DIR"
    return at_server if target is not None and is_named(target) else _MAKE_ONE


def _check_fits(calibration: Calibration, draft: str, target: str | None, names: str) -> None:
    if not calibration.fits(draft, target):
        raise OptionError(
            f"This calibration was made for {calibration.draft.name} and {calibration.target.name}; it does not fit "
            f"{names}, because the models or their weights differ.",
            hint=f"{_way_to_make(target)}.",
        )


def bin_of(signals: Signals) -> int:
    """The bin of a token, by its top probability alone: entropy and margin tell no more (NOTES.md)."""
    return bisect(_EDGES, signals.top_prob)


def risks_of(risks: Sequence[float], signals: Iterable[Signals]) -> list[float]:
    """The chance that the target disagrees with each token: between the middles of two bins it is interpolated."""
    found: list[float] = np.interp([token.top_prob for token in signals], _MIDDLES, risks).tolist()
    return found


def first_guess() -> tuple[list[float], list[float]]:
    """(judged tokens, wrong tokens) of each bin, before there are any."""
    return [_PRIOR] * NUM_BINS, [_PRIOR * (1 - middle) * 0.8 for middle in _MIDDLES]


class LearnedRisk:
    """The chance in bins that count verdicts as they come."""

    def __init__(self) -> None:
        self._num_judged, self._num_wrong = first_guess()

    def of(self, signals: Signals) -> float:
        """The share of wrong tokens in the bin of this token."""
        at = bin_of(signals)
        return self._num_wrong[at] / self._num_judged[at]

    def observe(self, judged: Sequence[Signals], num_accepted: int) -> None:
        """Count the tokens of a verdict: the first `num_accepted` were accepted, the next one, if any, was not."""
        for index, signals in enumerate(judged[: num_accepted + 1]):
            at = bin_of(signals)
            fading = min(1.0, _MEMORY / (self._num_judged[at] + 1))
            self._num_judged[at] = (self._num_judged[at] + 1) * fading
            self._num_wrong[at] = (self._num_wrong[at] + (index == num_accepted)) * fading
