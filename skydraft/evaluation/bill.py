"""What the questions of a comparison take of each model, where the target is a server that sells its tokens."""

from dataclasses import dataclass, replace

from skydraft.evaluation.findings import Findings
from skydraft.evaluation.measures import Case
from skydraft.types import LinkCost

LONG = 256  # tokens of a prompt; longer ones are a table of their own


@dataclass(frozen=True, slots=True)
class Bill:
    """The answers of one mode: the tokens of them that the draft model wrote, and what the server read and wrote."""

    mode: str
    num_questions: int
    num_drafted: int
    link: LinkCost


def bills(findings: Findings, *, is_long: bool) -> dict[str, Bill]:
    """By mode, over the link that is there, for the prompts that are longer than LONG, or for the others."""
    found = {}
    for setting in findings.settings:
        cases = [case for case in setting.all_cases if (case.generation.num_prompt_tokens > LONG) == is_long]
        if cases and setting.link_ms is None:
            asked = [_asked(case, streams=setting.mode.plan.without_skydraft().streams) for case in cases]
            num_drafted, link = sum(each[0] for each in asked), sum((each[1] for each in asked), LinkCost())
            found[setting.mode.name] = Bill(setting.mode.name, len(cases), num_drafted, link)
    return found


def _asked(case: Case, *, streams: bool) -> tuple[int, LinkCost]:
    """Tokens of the draft model, and what was asked: as counted, but each text reads its prompt anew, though a mode
    that ran before had left it in the server's cache.

    Where nothing was sold, what a server without skydraft would be asked: each call sends the text so far, of which it
    has what it read and wrote before; it checks by writing, and what `streams` there is one call.
    """
    num_prompt, records = case.generation.num_prompt_tokens, case.generation.records
    link, known = sum((record.link for record in records), LinkCost()), 0
    num_drafted = sum(record.num_committed - record.num_written for record in records)
    if link.num_requests:
        return num_drafted, replace(link, tokens_hit=min(link.tokens_hit, max(link.tokens_in - num_prompt, 0)))
    if streams:
        num_tokens = sum(record.num_committed for record in records)
        return 0, LinkCost(num_requests=1, tokens_in=num_prompt, tokens_out=num_tokens)
    link = LinkCost()
    for record in records:
        length = num_prompt + record.base
        if record.outcome == "verified":
            link += LinkCost(num_requests=1, tokens_in=length, tokens_hit=known)
        if record.outcome in ("verified", "written"):
            link += LinkCost(tokens_out=record.num_committed)
            known = length + record.num_committed
    return num_drafted, link
