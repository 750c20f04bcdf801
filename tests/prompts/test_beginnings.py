"""What a chat template says before any text of a user: the same on any day, and nobody's words."""

from __future__ import annotations

from datetime import datetime

import pytest

from skydraft.engines.toy import open_toy
from skydraft.engines.vocab import Vocab
from skydraft.prompts import chat_template
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import beginning_ids, prompt_ids
from tests.prompts.test_chat_template import MODELS, TEMPLATES


def bytes_vocab(template: str | None) -> Vocab:
    """One token a byte, but for pairs of line ends, which are one."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"\n\n"]

    def encode(text: str) -> list[int]:
        return [256 if part == b"\n\n" else part[0] for part in _parts(text.encode())]

    return Vocab(pieces, encode, chat_template=template, bos_text="<s>", eos_text="</s>")


def _parts(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(data):
        size = 2 if data[at : at + 2] == b"\n\n" else 1
        parts.append(data[at : at + size])
        at += size
    return parts


@pytest.mark.parametrize("model", MODELS)
def test_every_lone_question_begins_with_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = bytes_vocab(TEMPLATES[model])
    beginning = beginning_ids(vocab)
    assert beginning, model
    for day in (datetime(2001, 12, 3), datetime(2031, 3, 9), datetime(2044, 7, 30)):
        monkeypatch.setattr(chat_template, "_now", lambda day=day: day)
        assert beginning_ids(vocab) == beginning
        for question in ("why?", "天空", " 1", "\n\nx", "<|im_end|>", "a", "zz"):
            ids = prompt_ids(vocab, asked(question))
            assert ids[: len(beginning)] == beginning
            assert "why?" not in vocab.decode(beginning)


def test_it_ends_before_what_a_question_may_join() -> None:
    text = bytes_vocab(TEMPLATES["qwen2.5"]).decode(beginning_ids(bytes_vocab(TEMPLATES["qwen2.5"])))
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>user")


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('no') }}", "{{ messages[0]['content'] }}", "ab{{ messages[0]['content'] }}"]
)
def test_no_template_or_a_short_beginning_is_none(template: str | None) -> None:
    assert beginning_ids(bytes_vocab(template)) == ()


def test_a_toy_has_none() -> None:
    assert beginning_ids(open_toy("toy").vocab) == ()
