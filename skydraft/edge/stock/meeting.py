"""What is found out about a server without skydraft at the first contact: whether it can do its part, and its costs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from skydraft.characters import one_line
from skydraft.config import DecodingParams
from skydraft.decoding.cost_model import expected_tokens
from skydraft.edge.channel import Waiting
from skydraft.edge.stock.chat import Asked, Chat, TextDialect
from skydraft.edge.stock.costs import Costs
from skydraft.edge.stock.dialect import Dialect, read_safely
from skydraft.edge.stock.ledger import Carried, Request, Usage
from skydraft.edge.stock.wire import Events, Wire
from skydraft.errors import CloudFailure, OptionError

# Chinese, code, a special token, and characters of several bytes: other tokenizers differ here.
SAMPLE = "<|im_start|>user\n用一句话介绍北京的春天。def f(x):\n    return x ** 2  # 😀 naïve 12345\n"
PROMPT_LEN = 64  # tokens of a measurement
_NUM_WRITTEN, _NUM_CHECKED = 6, 6
_NUM_GOING_ON, _TEMPLATE = 4, 16
_MOST_EVENTS = 256  # of a text of a few tokens
_ALPHA = 0.75  # acceptance that is assumed where a draft may be checked in two ways


@dataclass(frozen=True, slots=True)
class Met:
    """A server's model: what to call it, and what it costs."""

    dialect: Dialect | TextDialect
    model: str
    context_len: int
    costs: Costs | None = None  # not measured yet

    def is_same(self, other: Met) -> bool:
        """Whether a text may go on at the other one."""
        return self.model == other.model and self.dialect.name == other.dialect.name

    def checks(self, num_draft: int) -> bool:
        """Whether a draft is checked in one request rather than written again: it takes less time."""
        if self.costs is None or not self.costs.check_ms or not num_draft:
            return False
        return self.costs.of_check(num_draft + 1) < expected_tokens(_ALPHA, num_draft) * self.costs.write_ms

    @property
    def forward_ms(self) -> tuple[float, ...]:
        """Milliseconds of judging n rows; a single one if each is written in turn. Wants costs."""
        assert self.costs is not None
        return self.costs.check_ms if self.checks(_NUM_CHECKED) else (self.costs.write_ms,)


async def check_that_it_goes_on(wire: Wire, met: Met, dialect: Chat, timeout_s: float) -> None:
    """Raise OptionError for a chat that begins its answer again, rather than go on from the last message."""
    question, begun = "从一数到十，只写汉字，不加标点。", "一二三四五"
    asked = Asked(({"role": "user", "content": question},), "", begun)
    path, body = dialect.going_on(met.model, asked, _NUM_GOING_ON, DecodingParams())
    request = wire.request(path, body, Carried(_most_tokens(question + begun)))
    text = "".join([told.text async for told in _events(wire, dialect, request, _NUM_GOING_ON, timeout_s)])
    if text.removeprefix(begun if dialect.echoes else "").lstrip().startswith("一二"):
        raise OptionError(
            f"{one_line(met.model)} at {wire.base} does not go on from the assistant's last message.",
            hint="Use --cloud-api completions, or another server.",
        )


async def measure(wire: Wire, met: Met, timeout_s: float) -> tuple[float, tuple[float, ...]]:
    """Milliseconds of a token written in a row after a short prompt, and of checks of n rows."""
    ids, times, dialect = [at % 16 for at in range(PROMPT_LEN)], [time.perf_counter()], met.dialect
    async for num_tokens, _ in written(wire, met, ids, _NUM_WRITTEN, timeout_s):
        times += [time.perf_counter()] * num_tokens
    if len(times) < 2:
        raise CloudFailure("The server wrote no tokens.")
    spread_ms, num_gaps = (times[-1] - times[1]) * 1e3, len(times) - 2
    # A server that sends all tokens at once shows no gaps between them.
    write_ms = spread_ms / num_gaps if spread_ms > 0 and num_gaps else (times[-1] - times[0]) * 1e3 / (num_gaps + 1)
    check_ms = list[float]()
    for num_drafts in (1, _NUM_CHECKED) if dialect.checks else ():
        assert not isinstance(dialect, TextDialect)
        began = time.perf_counter()
        num_rows = num_drafts + 1
        path, body = dialect.checking(met.model, ids, [at % 7 for at in range(num_drafts)], 0)
        num_sent = sum(PROMPT_LEN + at for at in range(num_rows))
        request = wire.request(path, body, Carried(num_sent, num_written=num_rows))
        read_safely(dialect.checked, await wire.answer(request, timeout_s), num_rows)
        request.says(Usage(num_written=num_rows))
        check_ms.append((time.perf_counter() - began) * 1e3)
    return max(write_ms, 1e-3), _between(*check_ms) if check_ms else ()


async def written(
    wire: Wire, met: Met, ids: Seq[int], num_tokens: int, timeout_s: float
) -> AsyncIterator[tuple[int, int]]:
    """(tokens, cached tokens of the prompt) of each event of a short text."""
    dialect = met.dialect
    if isinstance(dialect, TextDialect):
        text = f"{hash(tuple(ids)) % 10**6} {SAMPLE * (len(ids) // 32)}"  # other ids, another text from its start
        asked = Asked(({"role": "user", "content": text},), text, "")
        path, body = dialect.going_on(met.model, asked, num_tokens, DecodingParams())
        request = wire.request(path, body, Carried(_most_tokens(text)))
        async for told in _events(wire, dialect, request, num_tokens, timeout_s):
            yield bool(told.text), told.usage.num_cached
    else:
        path, body = dialect.writing(met.model, ids, num_tokens, 0)
        request = wire.request(path, body, Carried(len(ids)))
        async for read in _events(wire, dialect, request, num_tokens, timeout_s):
            yield len(read.rows), read.usage.num_cached


async def _events(
    wire: Wire, dialect: Dialect | TextDialect, request: Request, num_tokens: int, timeout_s: float
) -> AsyncIterator[Any]:
    """What each event of an answer of at most `num_tokens` says. None counts as cached, and all as written."""
    waiting = Waiting(timeout_s, timeout_s, timeout_s)
    events, num_events = Events(wire, request, dialect.life), 0
    read: Callable[[Any], Any] = dialect.told if isinstance(dialect, TextDialect) else dialect.written
    try:
        while (event := await events.next(waiting)) is not None:
            num_events += 1
            if num_events > _MOST_EVENTS:
                raise CloudFailure("The server does not end a text after a few tokens.")
            says = read_safely(read, event)
            request.says(Usage(says.usage.num_read, 0, num_tokens))
            yield says
    finally:
        events.close()


def _most_tokens(text: str) -> int:
    """At most so many tokens is a text, whatever the server's tokenizer: its bytes, and a template around it."""
    return len(text.encode()) + _TEMPLATE


def _between(two: float, seven: float) -> tuple[float, ...]:
    """Milliseconds of checks of 1 to 7 rows, from those of 2 and 7: a line between them."""
    first = min(two, seven)
    step = (seven - first) / (_NUM_CHECKED - 1)
    return tuple(max(first + (rows - 2) * step, 1e-3) for rows in range(1, _NUM_CHECKED + 2))
