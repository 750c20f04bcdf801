"""A vocabulary of bytes and of marks that are read wherever they stand in a text, as real tokenizers read them."""

import re

import numpy as np
from hypothesis import strategies as st

from skydraft.engines.toy import ToyEngine
from skydraft.engines.vocab import Vocab

_NAMES = ["im_start", "im_end", "endoftext", "AUDIO", "audio_bos", "begin_of_text", "eot_id", "start_header_id"]
_NAMES += ["end_header_id", "reserved_special_token_7", "user", "assistant", "end"]
MARKS = [f"<|{name}|>" for name in _NAMES]
MARKS += ["<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>", "<｜User｜>"]
MARKS += ["<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<<s>>"]
PIECES = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in MARKS]
SPECIAL = frozenset(range(256, len(PIECES)))
_ANY = re.compile("|".join(map(re.escape, sorted(MARKS, key=len, reverse=True))))

_parts = st.one_of(
    st.sampled_from([*MARKS, *(part for mark in MARKS for part in (mark[1:-1], mark[:-1], mark[1:]))]),
    st.sampled_from(["\n", "system\n", "你好", "cut0here", "|", "<", ">", "reserved_special_token_12"]),
)
texts = st.lists(_parts, min_size=1, max_size=5).map(lambda given: f"a{''.join(given)}z")


def encode(text: str) -> list[int]:
    token_ids, at = list[int](), 0
    for found in _ANY.finditer(text):
        token_ids += [*text[at : found.start()].encode(), id_of(found[0])]
        at = found.end()
    return token_ids + list(text[at:].encode())


def id_of(mark: str) -> int:
    return 256 + MARKS.index(mark)


def num_special(ids: list[int] | tuple[int, ...]) -> int:
    return sum(each in SPECIAL for each in ids)


def vocab_with(template: str, special_ids: frozenset[int] = SPECIAL) -> Vocab:
    end = [id_of("<|im_end|>")]
    marks = {"bos_text": "<s>", "eos_text": "</s>"}
    return Vocab(PIECES, encode, special_ids=special_ids, end_ids=end, chat_template=template, **marks)


def engine_with(template: str) -> ToyEngine:
    rows = np.random.default_rng(3).normal(0, 3, (len(PIECES), len(PIECES))).astype(np.float32)
    engine = ToyEngine(vocab_with(template), rows, context_len=16_384)
    engine.max_sequences = 4
    return engine
