"""The chance that the target disagrees with a drafted token: calibrated for a pair of models, or learned from verdicts.

A `Calibration` also has the agreement that each limit on the risk of a block keeps, which `CalibratedGate` uses.
`skydraft calibrate` makes one for a pair; that of the demo pair is shipped. `decoding/block_length.py` ends
blocks by a `LearnedRisk`: it changes how many tokens are drafted, never the text.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skydraft.characters import from_json
from skydraft.engines.vocab import Vocab
from skydraft.errors import OptionError, RecordsError
from skydraft.files import read_file
from skydraft.gating.gates import GateSpec, History, Reason, text_reason
from skydraft.gating.hand_back import HandBack, is_hand_back
from skydraft.types import DraftBlock, Signals, is_named, named_weights

SCHEMA: Literal[2] = 2
FEATURES = ("entropy", "log_entropy", "margin", "log_odds")
MAX_BLOCK = 12  # drafted tokens; longer blocks save next to no call (NOTES.md)
_PRIOR = 4.0  # judged tokens of a bin, by which the first guess outweighs one text
_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.99)  # of the top probability
_MEMORY = 400.0  # judged tokens in a bin; older ones fade, since a text may change its kind
_MAKE_ONE = "Make one with: skydraft calibrate --prompts FILE --edge-model X --cloud-model Y"


def features(signals: Signals) -> tuple[float, ...]:
    """The inputs of a token's risk, in the order of FEATURES."""
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

    name: str = Field(min_length=1)
    fingerprint: str = Field(min_length=1)


class CurvePoint(_Value):
    """What a limit on the risk of a block gave on the fitted prompts: the agreement, and per token what it took.

    That is calls, tokens that the target wrote itself, rows that it computed, and drafted tokens; the last three are 0
    in older files.
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
        if not is_hand_back(self.hand_back):
            raise ValueError(f"there is no hand-back '{self.hand_back}'")
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
    """The data that the calibration was made from."""

    workload: str
    sha256: str
    num_prompts: int
    num_tokens: int
    date: str
    max_new_tokens: int
    auroc: float


class Calibration(_Value):
    """The chance that the target disagrees with a drafted token is 1 / (1 + exp(−(bias + weights · features))).

    The risk of a block is the sum over its tokens: the number of disagreements to expect from skipping it. `curves`
    give the agreement that each limit on that risk kept. Short blocks have less risk than long ones, and where the
    target writes on after a correction less is left to skip, so there is a curve for each of several k and hand-backs.
    """

    kind: Literal["skydraft-calibration"] = "skydraft-calibration"
    schema_number: Literal[2] = Field(default=SCHEMA, alias="schema")
    draft: PairSide
    target: PairSide
    features: tuple[str, ...] = FEATURES
    weights: tuple[float, ...]
    bias: float
    curves: tuple[Curve, ...] = Field(min_length=1)
    fitted: Fitted

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        if self.features != FEATURES or len(self.weights) != len(FEATURES):
            raise ValueError(f"the features are not {', '.join(FEATURES)}")
        for hand_back in self.hand_backs:
            ks = [curve.k for curve in self.curves if curve.hand_back == hand_back]
            if ks != sorted(set(ks)):
                raise ValueError("the curves are not in the order of their k")
        if "0" not in self.hand_backs:
            raise ValueError("there is no curve without a hand-back")
        return self

    @property
    def hand_backs(self) -> tuple[str, ...]:
        """The hand-backs that have curves of their own."""
        return tuple(dict.fromkeys(curve.hand_back for curve in self.curves))

    def curve(self, k: int, hand_back: HandBack) -> Curve:
        """The curve for blocks of up to `k` tokens: that of the next shorter k, which is stricter, or the first.

        A hand-back without such a curve takes those without one: where the target writes on, the same limit keeps more.
        """
        of = {name: [curve for curve in self.curves if curve.hand_back == name] for name in (str(hand_back), "0")}
        shorter = (curve for known in of.values() for curve in reversed(known) if curve.k <= k)
        return next(shorter, min((curve for known in of.values() for curve in known), key=lambda curve: curve.k))

    def risk(self, signals: Signals) -> float:
        """The chance that the target disagrees with one token."""
        return risk(self.weights, self.bias, signals)

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

    def fits(self, draft: str, target: str | None) -> bool:
        """Whether it was made with models of these fingerprints; `target` None stands for any target.

        Of a target that is known by its name alone (`named_weights`) the whole name must be that of the model here.
        """
        known = (None, self.target.fingerprint, named_weights(self.target.name))
        return self.draft.fingerprint == draft and target in known


def read_calibration(path: Path) -> Calibration:
    """A calibration from its file. Raises RecordsError."""
    try:
        return _parse(str(path), read_file(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise RecordsError(
            f"The calibration {path} cannot be read: {reason}.", hint="Make one with skydraft calibrate."
        ) from error


def _parse(name: str, text: str) -> Calibration:
    try:
        parsed = from_json(text)
        schema = parsed.get("schema") if isinstance(parsed, dict) else None
        if isinstance(schema, int) and schema != SCHEMA:
            raise RecordsError(
                f"The calibration {name} has schema {schema}; this version reads {SCHEMA}.",
                hint=f"{'Update skydraft, or make' if schema > SCHEMA else 'Make'} it again with: skydraft calibrate.",
            )
        return Calibration.model_validate(parsed)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise RecordsError(
            f"{name} is not a calibration: {where}: {first['msg']}.", hint="Make one with skydraft calibrate."
        ) from error
    except ValueError as error:
        raise RecordsError(
            f"The calibration {name} is not JSON: {error}.", hint="Make it again with: skydraft calibrate."
        ) from error


def find_calibration(folders: Iterable[Path], draft: str, target: str | None, names: str) -> Calibration:
    """The calibration of a pair, from `folders` or shipped; `names` is for the message. Raises OptionError.

    One that was made with exactly this target goes before one that only has its name.
    """
    broken: RecordsError | None = None
    namesake: Calibration | None = None
    for read in _all(folders):
        try:
            calibration = read()
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
            hint=f"{_way_to_make(target)}.",
        )


class CalibratedGate:
    """Keeps the wanted agreement with the target.

    It escalates a block whose risk, the sum over its tokens, exceeds the calibrated limit for that agreement and blocks
    of up to `k` tokens.
    """

    def __init__(self, spec: GateSpec, calibration: Calibration, k: int, hand_back: HandBack) -> None:
        self._spec = spec
        self._calibration = calibration
        self._limit = calibration.limit(spec.threshold, k, hand_back)

    def is_unsure(self, signals: Sequence[Signals]) -> bool:
        """Whether skipping tokens with these signals together would risk too many disagreements."""
        return sum(map(self._calibration.risk, signals)) > self._limit

    def reason(self, history: History, block: DraftBlock, vocab: Vocab) -> Reason:
        """Why the block has to be escalated, or "" to skip it."""
        if not block.token_ids:
            return "always"
        return "uncertain" if self.is_unsure(block.free_signals) else text_reason(self._spec, history, block, vocab)


class LearnedRisk:
    """The chance by the top probability alone, in bins. Each bin starts with a guess and then counts verdicts."""

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
        self._num_judged = [_PRIOR] * len(middles)
        self._num_wrong = [_PRIOR * (1 - middle) * 0.8 for middle in middles]

    def of(self, signals: Signals) -> float:
        """The share of wrong tokens in the bin of this token."""
        at = bisect(_EDGES, signals.top_prob)
        return self._num_wrong[at] / self._num_judged[at]

    def observe(self, judged: Sequence[Signals], num_accepted: int) -> None:
        """Count the tokens of a verdict: the first `num_accepted` were accepted, the next one, if any, was not."""
        for index, signals in enumerate(judged[: num_accepted + 1]):
            at = bisect(_EDGES, signals.top_prob)
            fading = min(1.0, _MEMORY / (self._num_judged[at] + 1))
            self._num_judged[at] = (self._num_judged[at] + 1) * fading
            self._num_wrong[at] = (self._num_wrong[at] + (index == num_accepted)) * fading
