"""The reaction of a text to a server's error, as a pure function."""

from dataclasses import dataclass, field
from typing import Literal

from skydraft import errors
from skydraft.errors import CloudLost, SkydraftError

FALLBACK_S = 0.65  # silence after which a gated text continues alone; with a last try under way it stays below 1 s
MOVE_S = 1.0  # the same while another server has not been tried
_LIMIT_S = 1.0  # a gated text waits for so long for a server that says when to ask again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_MAX_FAILURES = 3  # "internal error" answers in a row before giving up

Step = Literal["again", "reconnect", "open again", "elsewhere", "alone", "give up"]


@dataclass(slots=True)
class Situation:
    """The state of a verification after a failed try. Times are in seconds during which this process ran.

    `falls_back`: the text may continue without the target. `has_others`: there is a server that was not tried yet.
    `num_tries` counts the failed tries before this one, `num_failures` those with an internal error of the server.
    `waited_s` counts from the first try, `silent_s` from the last sign of life of a server. `faults` are what each
    server said, by address, since the last pause.
    """

    timeout_s: float
    falls_back: bool = False
    has_others: bool = False
    num_tries: int = 0
    num_failures: int = 0
    waited_s: float = 0.0
    silent_s: float = 0.0
    began: float = 0.0
    is_told: bool = False  # whether the user knows that the text waits
    faults: dict[str, SkydraftError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovery:
    """The next action, after a pause. `is_late`: the time is over. `is_final`: no server can help the text any more."""

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
    # A text that waits for a silent server to the end tries once more in the last moment.
    if left_s < (1e-3 if is_silent and not now.falls_back else wanted.pause_s) or left_s <= 0:
        # A server that answers, but not this text in all its time, would hold it again and again.
        is_final = now.falls_back and left_s == time_left_s and not (is_silent and now.silent_s >= now.waited_s)
        return Recovery("alone" if now.falls_back else "give up", is_late=True, is_final=is_final)
    return Recovery(wanted.step, min(wanted.pause_s, left_s))


def _wanted(error: SkydraftError, now: Situation) -> Recovery:
    pause_s = min(_FIRST_PAUSE_S * 2**now.num_tries, _LONGEST_PAUSE_S)
    match error:
        case errors.SessionNotFound() | errors.BaseMismatch() | errors.Diverged() | errors.SessionTaken():
            return Recovery("open again", pause_s if now.num_tries else 0.0)  # each reopening feeds the prompt again
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
        # Perhaps the text outgrew the context.
        case errors.LimitExceeded() | errors.BudgetSpent() | errors.BrokenOff() if now.falls_back:
            return Recovery("alone", is_final=True)
    return Recovery("give up")
