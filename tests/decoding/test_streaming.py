"""Text as it comes: whole characters, nothing taken back, nothing of a stop string."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.decoding.generation import TextStream
from skydraft.engines.vocab import Vocab

from .. import toys
from ..toys import EOS, TOOL, VOCAB, ids, law


def stream(pieces, stop=()):
    """What each token shows, and what is left for the end."""
    text = TextStream(VOCAB, stop)
    return [text.push(token_id) for token_id in pieces], text.finish()


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "rest"),
    [
        (["我", "，我"], (), ["我", "，我"], ""),
        ([b"\xe5", b"\x91", b"\x98", "a"], (), ["", "", "员", "a"], ""),
        ([b"\xe5", b"\x91"], (), ["", ""], ""),  # an unfinished character is no text
        ([b"\xe5", "a"], (), ["", "\ufffda"], ""),
        ([b"\x98", "a"], (), ["\ufffd", "a"], ""),
        (["a", "b", "e"], ("be",), ["a", "", ""], ""),
        (["a", "b", "b", "e"], ("be",), ["a", "", "b", ""], ""),
        (["a", "b"], ("be",), ["a", ""], "b"),  # held, and right in the end
        (["a", "3", "ab"], ("3a",), ["a", "", ""], ""),
        (["ab"], ("b",), ["a"], ""),
        (["。\n", "a"], ("\n",), ["。", ""], ""),
        (["a", "a", "a", "b"], ("aab",), ["", "", "a", ""], ""),
        (["a", "b", "a", "e"], ("abb", "bae"), ["", "", "a", ""], ""),
        (["我", b"\xe5", b"\x91", b"\x98"], ("员",), ["我", "", "", ""], ""),
        (["我", b"<tool>", "你"], (), ["我", "", "你"], ""),
        (["我", b"<eos>"], (), ["我", ""], ""),
    ],
)
def test_what_is_shown_when(pieces, stop, shown, rest):
    assert stream(ids(*pieces), stop) == (shown, rest)


@pytest.mark.parametrize(("stop", "shown"), [(["b"], "x"), (["a", "b"], "x"), (["b", "a"], "x"), (["a"], "xbyb")])
def test_a_token_with_several_stop_strings_is_cut_at_the_first(stop, shown):
    assert TextStream(Vocab([b"xbyba"], list), stop).push(0) == shown


@law(200)
@given(
    st.lists(st.integers(0, VOCAB.size - 1), max_size=14),
    st.lists(st.text("ab我们员3.在。", min_size=1, max_size=4), max_size=3),
)
def test_the_pieces_are_the_decoded_text_cut_at_the_first_stop_string(pieces, stop):
    shown, rest = stream(pieces, stop)
    cut = VOCAB.decode(pieces)
    for length in range(len(pieces) + 1):
        text = VOCAB.decode(pieces[:length])
        if found := [text.find(one) for one in stop if one in text]:
            cut = text[: min(found)]
            break
    assert "".join(shown) + rest == cut
    # Nothing is held that no stop string could begin with.
    held = VOCAB.decode(pieces)[len("".join(shown)) :]
    assert not held or any(one.startswith(held) for one in stop) or any(one in VOCAB.decode(pieces) for one in stop)


@law(100)
@given(st.lists(st.binary(min_size=1, max_size=3), max_size=12))
def test_any_bytes_stream_to_what_they_decode_to_at_once(pieces):
    vocab = Vocab([*pieces, b""], list)
    text = TextStream(vocab)
    shown = [text.push(token_id) for token_id in range(len(pieces))]
    assert "".join(shown) + text.finish() == vocab.decode(range(len(pieces)))


@law(100)
@given(st.text(max_size=8), st.data())
def test_valid_text_never_shows_a_broken_character(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=4)) | {0, len(raw)})
    pieces = [raw[start:end] for start, end in itertools.pairwise(cuts)]
    piecewise = TextStream(Vocab([*pieces, b""], list))
    shown = [piecewise.push(token_id) for token_id in range(len(pieces))]
    assert "".join(shown) == text
    assert text.startswith("".join(shown[: len(shown) // 2]))


def test_nothing_comes_after_a_stop_string_and_finish_is_idempotent():
    text = TextStream(VOCAB, ["b"])
    assert [text.push(token_id) for token_id in [*ids("a", "b", "a", "S"), TOOL, EOS]] == ["a", "", "", "", "", ""]
    assert (text.finish(), text.finish()) == ("", "")
    held = TextStream(VOCAB, ["be"])
    held.push(ids("b")[0])
    assert (held.finish(), held.finish()) == ("b", "")
    assert toys.VOCAB.decode(ids("我", b"\xe5")) == "我"
