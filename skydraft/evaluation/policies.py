"""What each hand-back costs over a link: its calls and tokens from the pair's calibration, its time, and its price.

All figures are a token of the text. Tokens that were committed unverified and that the target reads later are left out,
as is what it writes until it hears that its turn is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.plan import make_plan
from skydraft.decoding.prices import Prices
from skydraft.gating.calibration import MAX_BLOCK, Calibration, Curve, CurvePoint
from skydraft.gating.hand_back import parse_hand_back

_PROMPT_LEN = 500  # tokens before the text, for prices of tokens


@dataclass(frozen=True, slots=True)
class Policy:
    """A hand-back at the agreement of mode auto, or `cloud`, the target alone, with one call a text."""

    name: str
    calls: float
    rows: float
    written: float
    ms: float

    length: int

    def price(self, prices: Prices) -> float:
        """The price of a text of `length` tokens after a prompt of 500, where each call sends all of it again.

        The prompt is read anew once, and so is each token that the server did not write itself.
        """
        read_again = max(self.calls * self.length - 1, 0.0) * (_PROMPT_LEN + self.length / 2)
        anew = _PROMPT_LEN + self.length * max(1 - self.rows, 0.0)
        return prices.total(read_again, anew, self.length * self.rows)


def policies(calibration: Calibration, costs: CostModel) -> list[Policy]:
    """The policies that have figures in the calibration and keep the agreement, and `cloud`."""
    plan, length = make_plan("auto"), calibration.fitted.max_new_tokens
    found = []
    for name in calibration.hand_backs:
        hand_back = parse_hand_back(name)
        curve = calibration.curve(plan.k or MAX_BLOCK, hand_back)
        point = _point(curve, plan.gate.threshold)
        if point is not None and curve.hand_back == name:  # a hand-back without a curve for this k is given that of "0"
            ms = _ms(point, costs, reads=hand_back.reads)
            figures = point.calls_per_token, point.rows_per_token, point.written_per_token
            found.append(Policy(name, *figures, ms, length))
    calls = 1 / length
    return [*found, Policy("cloud", calls, 1.0, 1.0, calls * costs.wire_ms + costs.pass_ms(1), length)] if found else []


def _point(curve: Curve, agreement: float) -> CurvePoint | None:
    """The loosest point that keeps the agreement, if it has figures of rows, which older calibrations lack."""
    enough = [point for point in curve.points if point.agreement >= agreement]
    return enough[-1] if enough and (enough[-1].rows_per_token or not enough[-1].calls_per_token) else None


def _ms(point: CurvePoint, costs: CostModel, *, reads: bool) -> float:
    """Milliseconds a token: drafts, calls with their round trips, and what the target writes on."""
    # Each call ends in one token of the target's; what it writes beyond that is a forward of one row each.
    calls, num_on = point.calls_per_token, max(point.written_per_token - point.calls_per_token, 0.0)
    each_ms = costs.pass_ms(1)
    if reads:
        each_ms = max(each_ms, costs.draft_ms) if costs.streams else each_ms + costs.draft_ms
    call_ms = costs.wire_ms + _judging_ms(max(point.rows_per_token - num_on, 0.0) / calls, costs) if calls else 0.0
    return point.drafted_per_token * costs.draft_ms + calls * call_ms + num_on * each_ms


def _judging_ms(num_rows: float, costs: CostModel) -> float:
    """Time of so many rows in passes; a fraction of a row is interpolated."""
    below = max(int(num_rows), 1)
    low, high = (costs.verify_ms(1.0, rows - 1) for rows in (below, below + 1))
    return low + max(num_rows - below, 0.0) * (high - low)


def table(known: Sequence[Policy], prices: Prices | None) -> Iterator[str]:
    """Lines of text, one a policy; the fastest and the cheapest are marked, and a stream that costs less than all."""
    fastest = min(known, key=lambda policy: policy.ms)
    cheapest = min(known, key=lambda policy: policy.price(prices)) if prices else None
    for each in known:
        price = f"{each.price(prices):>10.4g} a text of {each.length}" if prices else ""
        marks = [word for word, best in (("fastest", fastest), ("cheapest", cheapest)) if each is best]
        figures = f"{each.calls:.3f} calls  {each.written:.3f} written  {each.ms:>7.1f} ms"
        yield f"  {each.name:<11}{figures}{price}  {', '.join(marks)}".rstrip()
    if cheapest is not None and cheapest.name == "cloud":
        yield "  Stream this one instead: every gated mode costs more (--mode cloud)."
