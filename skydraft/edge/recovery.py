"""Choose what a text does after a server's error: a pure function."""

from dataclasses import dataclass, field
from typing import Literal

from skydraft import errors
from skydraft.errors import CloudLost, SkydraftError

FALLBACK_S = 0.65  # silence after which a gated text continues without the cloud; below 1 s with a last try
MOVE_S = 1.0  # the same limit while another server has not been tried
_LIMIT_S = 1.0  # longest wait of a gated text for a server that says when to retry
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_MAX_FAILURES = 3  # "internal error" answers in a row before giving up

Step = Literal["again", "reconnect", "open again", "elsewhere", "alone", "give up"]


@dataclass(slots=True)
class Situation:
    """The state of a verification after a failed try. Times are in seconds during which this process ran.

    `falls_back`: the text may continue without the target. `has_others`: an untried server is left. `num_tries` counts
    earlier failed tries, `num_failures` the server's internal errors among them. `waited_s` counts from the first try,
    `silent_s` from the server's last sign of life. `faults` has each server's error since the last pause, by address.
    """

    timeout_s: float
    falls_back: bool = False
    has_others: bool = False
    num_tries: int = 0
    num_failures: int = 0
    waited_s: float = 0.0
    silent_s: float = 0.0
    began: float = 0.0
    is_told: bool = False  # whether the user was shown that the text waits
    faults: dict[str, SkydraftError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovery:
    """The next step, after a pause. `is_late`: the time is over. `is_final`: no server can continue this text."""

    step: Step
    pause_s: float = 0.0
    is_late: bool = False
    is_final: bool = False


def recover(error: SkydraftError, now: Situation) -> Recovery:
    wanted = _wanted(error, now)
    if wanted.step in ("give up", "alone"):
        return wanted
    is_silent = isinstance(error, CloudLost)
    time_left_s = left_s = now.timeout_s - now.waited_s
    if is_silent:
        limit_s = MOVE_S if wanted.step == "elsewhere" else FALLBACK_S
        left_s = min(left_s, (limit_s if now.falls_back else now.timeout_s) - now.silent_s)
    # A text that can only wait for a silent server tries once more in the last moment.
    if left_s < (1e-3 if is_silent and not now.falls_back else wanted.pause_s) or left_s <= 0:
        # This server answers others but never this text, so it would block the text again.
        is_final = now.falls_back and left_s == time_left_s and not (is_silent and now.silent_s >= now.waited_s)
        return Recovery("alone" if now.falls_back else "give up", is_late=True, is_final=is_final)
    return Recovery(wanted.step, min(wanted.pause_s, left_s))


def _wanted(error: SkydraftError, now: Situation) -> Recovery:
    pause_s = min(_FIRST_PAUSE_S * 2**now.num_tries, _LONGEST_PAUSE_S)
    match error:
        case errors.SessionNotFound() | errors.BaseMismatch() | errors.Diverged() | errors.SessionTaken():
            return Recovery("open again", pause_s if now.num_tries else 0.0)  # pause: each reopening feeds the prompt
        case errors.NotAuthorized() | errors.TlsFailure() | errors.TargetChanged() | errors.VocabularyMismatch():
            return Recovery("elsewhere" if now.has_others else "give up")
        case errors.RateLimited():
            pause_s = max(pause_s, error.retry_after_s)
            is_long = now.falls_back and now.waited_s + pause_s > _LIMIT_S
            return Recovery("alone", is_late=True) if is_long else Recovery("again", pause_s)
        case errors.CloudBusy() | errors.CloudTimeout():
            return Recovery("again", pause_s)
        case CloudLost():
            return Recovery("elsewhere") if now.has_others else Recovery("reconnect", pause_s)
        case errors.ContentFiltered() | errors.LeftGrammar():
            return Recovery("give up")
        case errors.CloudFailure():
            if now.num_failures + 1 >= _MAX_FAILURES:
                return Recovery("alone" if now.falls_back else "give up")
            return Recovery("elsewhere") if now.has_others and now.num_failures else Recovery("open again", pause_s)
        # For example, the text has outgrown the server's context.
        case errors.LimitExceeded() | errors.BudgetSpent() | errors.BrokenOff() if now.falls_back:
            return Recovery("alone", is_final=True)
    return Recovery("give up")
