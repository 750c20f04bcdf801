"""The target's side of one generation: a session and its sequence, what it refuses, and several that judge together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import DecodingParams
from skydraft.decoding.verification import TargetSession
from skydraft.errors import BaseMismatch, EngineError
from skydraft.types import Cost, DraftBlock

from .. import toys
from ..toys import ASKED, PROMPT_IDS, law
from .judging import any_token, choices, endless, expected_verdict, judged, seated

texts = st.lists(any_token, max_size=8)


@law(40)
@given(toys.seeds, endless(), texts, texts, texts, st.integers(1, 4))
def test_a_session_takes_over_the_sequence_of_another_with_its_prompt(seed, params, mine, theirs, drafted, max_rows):
    """Whatever the KV cache holds of the other text, the verdict is that of a fresh sequence."""
    target = toys.toy(seed)
    former = seated(target, params, committed=theirs)
    judged(former, DraftBlock(len(theirs), tuple(drafted)))
    session = TargetSession(target, ASKED, params, committed=mine)
    session.adopt(former.release())
    block = DraftBlock(len(mine), tuple(choices(target, params, mine, 3)))
    assert judged(session, block, max_rows=max_rows) == expected_verdict(target, params, mine, block.token_ids)


def test_a_verification_that_was_overtaken_commits_nothing():
    target, params = toys.toy(3), DecodingParams(max_new_tokens=50, min_new_tokens=50)
    session = seated(target, params)
    late, first = (session.begin(DraftBlock(0, ()), ()) for _ in range(2))
    for work in (late, first):
        while (token_ids := work.next_feed(4)) is not None:
            work.absorb(work.sequence.extend(token_ids))
            work.sequence.align(toys.array(PROMPT_IDS))
    verdict = session.commit(first, Cost())
    before = session.token_ids.tolist()
    with pytest.raises(BaseMismatch):
        session.commit(late, Cost())
    assert session.token_ids.tolist() == before == [*PROMPT_IDS, verdict.token_id]


def test_a_row_that_is_no_number_ends_those_that_need_it_and_no_others():
    """The first token is wrong, so what follows it is never needed, whatever its row holds."""
    target, params = toys.toy(3), DecodingParams(max_new_tokens=50, min_new_tokens=50)
    right = choices(target, params, [], 4)
    blocks = [DraftBlock(0, (*wrong, *right[1:])) for wrong in ((right[0],), ((right[0] + 1) % 20,))]
    broken, fine = [seated(target, params).begin(block, ()) for block in blocks]
    rows = [work.sequence.extend(work.next_feed(9)).copy() for work in (broken, fine)]
    for each in rows:
        each[1:] = np.nan
    with pytest.raises(EngineError, match="not numbers"):
        broken.absorb(rows[0])
    fine.absorb(rows[1])
    assert fine.next_feed(9) is None
