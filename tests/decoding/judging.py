"""What a verdict has to be, from its definition, and a session of the target that judges step by step."""

import dataclasses

from hypothesis import strategies as st

from skydraft.choosing.stopping import Stopping
from skydraft.decoding.verification import TargetSession
from skydraft.types import Cost, Verdict

from .. import reference, toys
from ..toys import ASKED, PROMPT_IDS, VOCAB

any_token = st.integers(0, VOCAB.size - 1)


def choices(engine, params, generated, num_tokens, prompt=PROMPT_IDS):
    """What a model would write after `prompt` and `generated`, whatever the stopping rules say."""
    token_ids = [*prompt, *generated]
    for _ in range(num_tokens):
        token_ids.append(reference.next_token(engine, token_ids, len(prompt), params))
    return token_ids[len(token_ids) - num_tokens :]


def expected_verdict(target, params, generated, block, prompt=PROMPT_IDS):
    """The verdict from its definition: walk the block until a difference or an end."""
    stopping, base = Stopping(params, VOCAB, params.max_new_tokens), len(generated)
    for index, drafted in enumerate(block):
        written = [*generated, *block[:index]]
        (choice,) = choices(target, params, written, 1, prompt)
        finish = stopping.finish(toys.array([*written, choice]))
        if choice != drafted:
            return Verdict(base, index, choice, finish)
        if finish:
            return Verdict(base, index + 1, None, finish)
    (bonus,) = choices(target, params, [*generated, *block], 1, prompt)
    return Verdict(base, len(block), bonus, stopping.finish(toys.array([*generated, *block, bonus])))


def endless():
    """Any parameters, but a length limit that no test here reaches."""
    return toys.params().map(lambda params: dataclasses.replace(params, max_new_tokens=200))


def seated(target, params, *, committed=()):
    """A session with a sequence of its own, its prompt in the cache."""
    session = TargetSession(target, ASKED, params, committed=committed)
    session.adopt(target.begin(ASKED.token_ids))
    while session.needs_prefill:
        session.prefill()
    return session


def judged(session, block, catch_up=(), max_rows=2):
    """The verdict of a session, step by step."""
    session.check(block, catch_up)
    work = session.begin(block, catch_up)
    while (token_ids := work.next_feed(max_rows)) is not None:
        work.absorb(work.sequence.extend(token_ids))
    return session.commit(work, Cost())
