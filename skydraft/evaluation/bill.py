"""What the questions of a comparison cost at a server that wants money for its tokens, by mode and by model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from skydraft.decoding.prices import Prices
from skydraft.evaluation.findings import Findings, Setting
from skydraft.evaluation.measures import Case
from skydraft.types import LinkCost

LONG = 256  # tokens; longer prompts are a table of their own


@dataclass(frozen=True, slots=True)
class Bill:
    """The answers of one mode to prompts that are long, or are not: what the server read and wrote, and the tokens of
    the answers that the draft model wrote. `over_stream` is the cost in units of that of mode cloud."""

    mode: str
    is_long: bool
    num_questions: int
    num_drafted: int
    link: LinkCost
    cost: float
    over_stream: float | None = None


def bills(findings: Findings, prices: Prices) -> Iterator[Bill]:
    """Of each mode, short prompts first; over the real link alone."""
    for is_long in (False, True):
        found = [_bill(setting, is_long, prices) for setting in findings.settings if setting.link_ms is None]
        stream = next((bill.cost for bill in found if bill.mode == "cloud"), 0.0)
        for bill in found:
            if bill.num_questions:
                yield replace(bill, over_stream=bill.cost / stream if stream else None)


def _bill(setting: Setting, is_long: bool, prices: Prices) -> Bill:
    cases = [case for case in setting.all_cases if (case.generation.num_prompt_tokens > LONG) == is_long]
    link = sum(map(_asked, cases), LinkCost())
    records = [record for case in cases for record in case.generation.records]
    num_drafted = sum(record.num_committed - record.num_written for record in records)
    return Bill(setting.mode.name, is_long, len(cases), num_drafted, link, prices.of(link))


def is_counted(findings: Findings) -> bool:
    """Whether a server counted the tokens; else they are those that one without skydraft would have been asked for."""
    lines = (case.generation for setting in findings.settings for case in setting.all_cases)
    return any(record.link.tokens_in for line in lines for record in line.records)


def _asked(case: Case) -> LinkCost:
    """As if no mode had asked the question before: each text's prompt is read anew once, though a mode that ran before
    had left it in the server's cache."""
    link = sum((record.link for record in case.generation.records), LinkCost())
    if not link.tokens_in:
        return _would_be_asked(case)
    again = max(link.tokens_in - case.generation.num_prompt_tokens, 0)
    return replace(link, tokens_hit=min(link.tokens_hit, again))


def _would_be_asked(case: Case) -> LinkCost:
    """Each call sends the text so far, of which the server has what it read and wrote before. It checks by writing."""
    num_prompt, link, known = case.generation.num_prompt_tokens, LinkCost(), 0
    for record in case.generation.records:
        if record.outcome == "verified":
            length = num_prompt + record.base
            link += LinkCost(num_requests=1, tokens_in=length, tokens_hit=min(known, length))
        if record.outcome in ("verified", "written"):
            link += LinkCost(tokens_out=record.num_committed)
            known = num_prompt + record.base + record.num_committed
    return link
