"""The context only grows, only from where it ends, and never shows a way to change it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.context import Context
from skydraft.engines.base import TokenBuffer
from skydraft.errors import BaseMismatch
from skydraft.types import DraftBlock, Prompt, Verdict

from ..toys import law

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@law(100)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=70),
    st.lists(st.tuples(st.booleans(), tokens, st.integers(0, 6), st.integers(-2, 2)), max_size=30),
)
def test_a_context_is_its_prompt_and_what_was_committed(prompt, steps):
    context, expected, num_seen = Context(Prompt(tuple(prompt))), [], 0
    for is_verdict, drafted, num_accepted, shift in steps:
        block = DraftBlock(max(0, len(expected) + shift), tuple(drafted))
        num_accepted = min(num_accepted, len(drafted))
        verdict = Verdict(block.base, num_accepted, 7)
        if block.base != len(expected):
            with pytest.raises(BaseMismatch):
                context.commit_verdict(block, verdict) if is_verdict else context.commit_skip(block, "eos")
            with pytest.raises(BaseMismatch):
                context.commit_verdict(DraftBlock(len(expected), tuple(drafted)), verdict)
        elif is_verdict:
            assert context.commit_verdict(block, verdict) == (*drafted[:num_accepted], 7)
            expected += [*drafted[:num_accepted], 7]
            num_seen = len(expected)
        else:
            assert context.commit_skip(block, None) == tuple(drafted)
            expected += drafted
        assert (context.base, context.generated.tolist()) == (len(expected), expected)
        assert context.token_ids.tolist() == [*prompt, *expected]
        assert (context.num_seen, context.catch_up) == (num_seen, tuple(expected[num_seen:]))
        assert context.finish is None


@pytest.mark.parametrize("view", ["token_ids", "generated"])
def test_the_tokens_cannot_be_written_from_outside(view):
    context = Context(Prompt((1, 2, 3)))
    context.commit_skip(DraftBlock(0, (4,)), None)
    with pytest.raises(ValueError, match="read-only"):
        getattr(context, view)[0] = 9


@law(100)
@given(st.lists(st.tuples(tokens, st.floats(0, 1)), max_size=40))
def test_a_token_buffer_is_a_list(steps):
    buffer, expected = TokenBuffer(), []
    for added, share in steps:
        buffer.extend(added)
        expected += added
        assert buffer.view.tolist() == expected
        length = round(share * len(expected))
        buffer.truncate(length)
        del expected[length:]
        assert buffer.view.tolist() == expected and len(buffer) == len(expected)
    buffer.extend(more := list(range(1000)))  # past any room it had
    expected += more
    assert buffer.view.tolist() == expected
    for wrong in (-1, len(expected) + 1):
        with pytest.raises(ValueError):
            buffer.truncate(wrong)
