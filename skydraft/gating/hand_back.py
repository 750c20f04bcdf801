"""How long the target keeps writing after it has corrected a draft. It chooses each of these tokens itself."""

from dataclasses import dataclass

from skydraft.config import is_number
from skydraft.errors import OptionError
from skydraft.types import WRITE_ALL

MAX_AGREED = 64
_HINT = "Use 0, a number of tokens, agree:M (for example agree:4), or text."


@dataclass(frozen=True, slots=True)
class HandBack:
    """After a correction the target writes at most `num_tokens` more.

    With `agreed` it also stops once the draft model agrees with the last `agreed` tokens. `HandBack()` is the
    correction alone. Raises OptionError for numbers out of range.
    """

    num_tokens: int = 0
    agreed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.num_tokens <= WRITE_ALL and 0 <= self.agreed <= MAX_AGREED):
            raise OptionError(f"There is no hand-back {self}.", hint=_HINT)

    @property
    def reads(self) -> bool:
        return self.agreed > 0

    def is_over(self, num_written: int, num_agreed: int) -> bool:
        """Whether the draft model should continue, after `num_written` tokens; it agrees with the last `num_agreed`."""
        return num_written >= self.num_tokens or (self.reads and num_agreed >= self.agreed)

    def __str__(self) -> str:
        if self.agreed:
            return f"agree:{self.agreed}"
        return "text" if self.num_tokens == WRITE_ALL else str(self.num_tokens)


def parse_hand_back(text: str | int) -> HandBack:
    name, colon, number = str(text).partition(":")
    if name == "text" and not colon:
        return HandBack(WRITE_ALL)
    if name == "agree" and is_number(number) and int(number):
        return HandBack(WRITE_ALL, int(number))
    if not colon and is_number(name):
        return HandBack(int(name))
    raise OptionError(f"There is no hand-back '{text}'.", hint=_HINT)
