"""A prompt that is far too long is refused by its beginning: reading all of it takes seconds, which nothing can end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.vocab import Vocab
from skydraft.errors import ContextExceeded
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import prompt_ids

from .. import toys


@pytest.mark.parametrize("text", ["我" * 2_000_000, "我3" * 10_000])
def test_a_text_that_is_far_too_long_is_read_only_in_part(text: str) -> None:
    """An agent leaves out as many tokens as the number says."""
    lengths = list[int]()

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return list(toys.VOCAB.encode(text))

    with pytest.raises(ContextExceeded, match=r"about \d+ tokens, the context holds 100") as raised:
        prompt_ids(Vocab(toys.PIECES, encode), asked(text), raw=True, most=100)
    assert sum(lengths) < 2000
    assert raised.value.num_tokens == pytest.approx(len(toys.VOCAB.encode(text)), rel=0.1)


@given(st.integers(1, 900), st.integers(100, 400))
@toys.law(50)
def test_what_fits_is_read_as_ever(num_chars: int, most: int) -> None:
    vocab, messages = toys.vocab(), asked("我3" * num_chars)
    ids = prompt_ids(vocab, messages, raw=True)
    if len(ids) <= most:
        assert prompt_ids(vocab, messages, raw=True, most=most) == ids
