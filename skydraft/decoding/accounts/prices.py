from dataclasses import dataclass

from skydraft.errors import OptionError
from skydraft.types import LinkCost

_MOST = 1e12  # sums stay finite


@dataclass(frozen=True, slots=True)
class Prices:
    """A server's prices per million tokens, in any currency: cached input, other input, output."""

    hit: float
    miss: float
    out: float

    def of(self, link: LinkCost) -> float:
        """Return the price of requests. Tokens count as uncached unless the server reported a cache hit."""
        return self.total(link.tokens_hit, link.tokens_in - link.tokens_hit, link.tokens_out)

    def total(self, num_hit: float, num_miss: float, num_out: float) -> float:
        return (num_hit * self.hit + num_miss * self.miss + num_out * self.out) / 1e6


def parse_prices(text: str) -> Prices:
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(0 <= number <= _MOST for number in numbers):
        hint = "Prices per million tokens: cached, read, written; for example --price 0.02,1,4."
        raise OptionError(f"--price must be three numbers from 0 to {_MOST:g}, not '{text}'.", hint=hint)
    return Prices(*numbers)
