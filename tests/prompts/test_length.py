"""A prompt that is far too long is refused by its beginning: reading all of it takes seconds, which nothing can end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.vocab import Vocab
from skydraft.errors import ContextExceeded
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import prompt_ids

from .. import toys


def test_a_text_that_is_far_too_long_is_read_only_in_part() -> None:
    """Its length is estimated: agents compute from it how much they leave out."""
    lengths = list[int]()

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return [0] * (text.count("我") + 3 * text.count("你"))

    with pytest.raises(ContextExceeded, match=r"about \d+ tokens, the context holds 100") as raised:
        prompt_ids(Vocab(toys.PIECES, encode), asked("我" * 1_000_000 + "你" * 1_000_000), raw=True, most=100)
    assert sum(lengths) < 2000 and raised.value.num_tokens == pytest.approx(4_000_000, rel=0.1)
    for length in range(9, 40):
        with pytest.raises(ContextExceeded, match=f"about {length} tokens, the context holds 1"):
            prompt_ids(toys.VOCAB, asked("我" * length), raw=True, most=1)


@given(st.integers(1, 900), st.integers(100, 400))
@toys.law(50)
def test_what_fits_is_read_as_ever(num_chars: int, most: int) -> None:
    vocab, messages = toys.vocab(), asked("我3" * num_chars)
    ids = prompt_ids(vocab, messages, raw=True)
    if len(ids) <= most:
        assert prompt_ids(vocab, messages, raw=True, most=most) == ids
