"""When a generation ends (F13): sentence ends, stop strings, end tokens and the length, after every single token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import generate, make_plan
from skydraft.choosing.stopping import Said, Stopping, said_along
from skydraft.config import DecodingParams
from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Vocab

from .. import toys
from ..toys import TOOL, VOCAB, ids, law


def ending(pieces, **options):
    """(pieces written when it ended, why) for a generation that is asked after each token."""
    params = DecodingParams(**options)
    stopping = Stopping(params, VOCAB, params.max_new_tokens)
    for number in range(1, len(pieces) + 1):
        if reason := stopping.finish(toys.array(pieces[:number])):
            return number, reason
    return None


@pytest.mark.parametrize(("text", "num"), [
    ("", 0), ("你好", 0), ("你好。", 1), ("你好！我在。", 2), ("真的？！", 1), ("真的？！。", 1),
    ("你好。”", 1), ("“你好。”他说。", 2), ("你好｡再见﹒", 2), ("It is so.", 1), ("It is so. Yes!", 2),
    ("It is 3.5 m", 0), ("It is 3.5 m.", 1), ("共3.5米。", 1), ("Wait...", 1), ("Wait... what?", 2),
    ("See e.g. this", 0), ("See e.g.", 0), ("That is, i.e. this.", 1), ("In the U.S. army", 0),
    ("J. Smith came.", 1), ("Dr. Who", 0), ("www.example.com", 0), ("a.b", 0), ("It was 1999. Then", 1),
    ("是3.然后", 1), ("1. First", 1), (".", 0), ("好．", 1), ("3．5", 0),
])  # fmt: skip
def test_counting_sentences(text, num):
    assert Said().then(text.encode()).num_sentences == num


def test_a_text_ends_a_sentence_if_spaces_a_closing_and_spaces_follow():
    for text in ("好。", "好。 ”\n", "好。”） ", "It is so. "):
        assert Said().then(text.encode()).ends_sentence
    for text in ("“好。” 他", "好。” ”", "好。 ” ”", "好，", "e.g.", "It is 3.", ""):
        assert not Said().then(text.encode()).ends_sentence


# Dots, quotes, spaces, abbreviations, halves of characters, and bytes that are none.
PIECES = [
    b".", b"..", b" ", b"\n", "。".encode(), "」".encode(), b")", b"e.g", b"U", b"a.b", b"3", b"3.5", "我们".encode(),
    b"\xe6", b"\x88", b"\x91", b"\xff", "，".encode(), b"? ", "！”".encode(), b"x" * 70, b"." * 70, b"",
]  # fmt: skip
texts = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)


@law(300)
@given(st.lists(st.tuples(st.integers(0, 24), texts), min_size=1, max_size=6))
def test_sentences_along_the_tokens_are_those_of_the_text(walk):
    """Of texts that go on from somewhere in the one before."""
    vocab, written = Vocab(PIECES, lambda text: [0]), []
    along = said_along(vocab)
    for keep, more in walk:
        written = written[:keep] + more
        said, whole = along.at(toys.array(written)), Said().then(vocab.decode(written).encode())
        assert (said.ends_sentence, said.num_sentences) == (whole.ends_sentence, whole.num_sentences)


ONE, TWO = {"sentences": 1}, {"sentences": 2}


@pytest.mark.parametrize(("pieces", "options", "expected"), [
    # F13: neither early, at a decimal or "e.g.", nor past the sentence
    ("我|。|你", ONE, (2, "sentences")), ("我|。|你|！|他", TWO, (4, "sentences")),
    ("我|？”|你", ONE, (2, "sentences")), ("3|.|5|。", ONE, (4, "sentences")), ("e|.g|.", ONE, None),
    ("3|.| |a|b|.", ONE, (6, "sentences")), ("ab|.|.|.", ONE, (2, "sentences")), (" U|.|S|.", ONE, None),
    # marks in a row are one end: the second sentence has not come yet
    ("我|？|！|你|。", TWO, (5, "sentences")),
    # before the minimum nothing ends, and what closes the sentence later does
    ("我|。|你|他|。", ONE | {"min_new_tokens": 4}, (5, "sentences")),
    ("我|。|”|你", ONE | {"min_new_tokens": 3}, (3, "sentences")), ("我|。|你", ONE | {"min_new_tokens": 3}, None),
    # the order of reasons; the minimum bans an end in the chooser: an end token that came is an end
    ("我|<eos>", {}, (2, "eos")), ("<eos>", {"min_new_tokens": 5}, (1, "eos")),
    ("我|我|我", {"max_new_tokens": 3}, (3, "length")), ("我|<tool_call>|我", {"stop_token_ids": (TOOL,)}, (2, "eos")),
    ("我|你", {"stop_token_ids": tuple(sorted(ids("你", "他"))), "stop": ("你",)}, (2, "eos")),
    ("我|我|。", ONE | {"max_new_tokens": 3}, (3, "sentences")), ("我|。", ONE | {"stop": ("。",)}, (2, "stop_string")),
    ("a|b", {"max_new_tokens": 2, "stop": ("ab",)}, (2, "stop_string")),
    # across special tokens, and a character in bytes
    ("a|<tool_call>|b", {"stop": ("ab",)}, (3, "stop_string")),
    ("\udce5|\udc91|\udc98", {"stop": ("员",)}, (3, "stop_string")),
])  # fmt: skip
def test_when_a_text_ends_and_why(pieces, options, expected):
    assert ending(ids(*pieces.encode(errors="surrogateescape").split(b"|")), **options) == expected


def follower(text, vocab=VOCAB):
    """A model that writes `text` round and round, whatever the prompt, and is sure of it."""
    table = np.zeros((vocab.size, vocab.size), np.float32)
    table[:, vocab.encode(text)[0]] = 15
    table[vocab.encode(text)[:-1], vocab.encode(text)[1:]] = 40
    return ToyEngine(vocab, table)


@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless"])
@pytest.mark.parametrize(("prompt", "text", "options"), [
    ("我。", "你他", {"sentences": 1}), ("我。", "”你", {"sentences": 1}), ("a", "3b", {"stop": ("a3",)}),
])  # fmt: skip
def test_what_the_prompt_holds_ends_nothing(mode, prompt, text, options):
    model, params = follower(text), DecodingParams(max_new_tokens=4, **options)
    done = generate(prompt, edge=model, cloud=model, plan=make_plan(mode, k=5), params=params, raw=True).run()
    assert (done.text, done.finish_reason) == (text * 2, "length")


@law(150)
@given(
    st.lists(st.integers(0, VOCAB.size - 3), max_size=12),
    st.lists(st.text("ab我们员3.在。", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_ends_with_the_token_that_completes_it(pieces, stop):
    texts = [VOCAB.text_bytes(pieces[: length + 1]) for length in range(len(pieces))]
    first = next((n for n, text in enumerate(texts, 1) if any(one.encode() in text for one in stop)), None)
    assert ending(pieces, stop=tuple(stop)) == (first and (first, "stop_string"))
