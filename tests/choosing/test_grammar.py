"""A grammar is a function of the prefix: a matcher that goes back and forth allows what a fresh one does, and an oracle
that shares nothing with it."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft import DecodingParams, decoding_params
from skydraft.choosing.chooser import Chooser
from skydraft.choosing.grammar import GrammarAlong, compile_grammar, only_one
from skydraft.engines.vocab import Vocab
from skydraft.errors import GrammarRefused, MissingDependency
from skydraft.grammars import followable, json_schema
from skydraft.prompts.tool_calls import calling_grammar
from tests import grammars, toys
from tests.grammars import BYTES, ENDS, GRAMMARS, JSONS, spelled
from tests.toys import EOS, VOCAB, array, law

pytest.importorskip("llguidance")

# How each step goes: on with one of the tokens that may come, or, where negative, with any token.
steps = st.lists(st.integers(-1, 400), max_size=20)
walks = st.lists(st.tuples(st.integers(0, 24), steps), min_size=1, max_size=5)


def along(grammar: str, vocab: Vocab, prompt_len: int = 0) -> GrammarAlong:
    return GrammarAlong(compile_grammar(grammar, vocab), vocab, prompt_len)


def walked(follower: GrammarAlong, walk: Any, prompt: list[int]) -> Iterator[tuple[list[int], Any]]:
    """(What is written, what may come next) at each step of a walk that goes back now and then."""
    generated: list[int] = []
    for keep, choices in walk:
        generated = generated[:keep]
        for choice in choices:
            yield generated, (mask := follower.allowed(array(prompt + generated)))
            may = np.flatnonzero(mask)
            generated.append(int(may[choice % len(may)]) if choice >= 0 else len(generated) * 7 % len(mask))


@law(30)
@given(st.sampled_from(GRAMMARS), walks, st.integers(0, 3))
def test_what_may_come_next_is_what_the_oracle_says(grammar: str, walk: Any, prompt_len: int) -> None:
    for generated, mask in walked(along(grammar, VOCAB, prompt_len), walk, [1] * prompt_len):
        assert np.array_equal(mask, grammars.allowed(grammar, generated, VOCAB)), generated


@law(30)
@given(st.sampled_from(JSONS), walks)
def test_going_back_and_on_is_as_beginning_anew(grammar: str, walk: Any) -> None:
    for generated, mask in walked(along(grammar, BYTES), walk, []):
        may = np.flatnonzero(mask)
        assert np.array_equal(mask, along(grammar, BYTES).allowed(array(generated))), generated
        assert len(may) and (mask[list(ENDS)].all() or not mask[list(ENDS)].any())
        assert only_one(mask) == (may[0] if len(may) == 1 else None)


def test_a_name_that_must_come_is_gone_in_the_tokens_of_the_tokenizer() -> None:
    follower = along(JSONS[1], BYTES)
    assert only_one(follower.allowed(array(spelled('{"')))) == spelled("name")[0]
    assert only_one(follower.allowed(array(spelled('{"n')))) == spelled("ame")[0]  # however it was begun
    assert only_one(follower.allowed(array(spelled('{"name": "')))) is None


@pytest.mark.parametrize("parallel", [False, True])
def test_the_marks_of_a_call_are_one_token_each(parallel: bool) -> None:
    """What may follow a mark must not make it five tokens: `>` and a line break can be one."""
    marks, end = [b"<tool_call>", b"</tool_call>"], b"<end>"
    others = [b"</", b"tool", b"_call", b">\n", b"><", b"}\n"]
    pieces = [bytes([byte]) for byte in range(256)] + others + marks + [end]
    words = re.compile(b"|".join(map(re.escape, [*marks, b"}\n", b">\n", b"</"])) + b"|.", re.S)
    vocab = Vocab(
        pieces, lambda text: [pieces.index(word) for word in words.findall(text.encode())],
        special_ids=[len(pieces) - 1], end_ids=[len(pieces) - 1],
    )  # fmt: skip
    schema = {"properties": {"a": {"enum": ["<tool_call>", "x"]}}, "required": ["a"]}
    follower = along(calling_grammar([{"name": "f", "parameters": schema}], parallel=parallel), vocab)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "<tool_call>"}}\n</tool_call>'
    written = vocab.encode(call)
    assert [pieces[token_id] for token_id in (written[0], written[-1])] == marks
    for at, token_id in enumerate(written):
        mask = follower.allowed(array(written[:at]))
        assert mask[token_id] and (mask.sum() == 1 or at not in (0, len(written) - 1))
    assert follower.allowed(array(written)).nonzero()[0].tolist() == [10] * parallel + [len(pieces) - 1]


def test_the_grammar_wins_where_the_rest_would_leave_no_token() -> None:
    row = np.zeros(VOCAB.size, np.float32)
    chooser = Chooser(decoding_params(grammar="regex:aaaa", min_new_tokens=10, no_repeat_ngram_size=1), VOCAB, 0)
    for num in range(4):  # the n-gram ban has the one token that fits
        assert chooser.choose(row, array(toys.ids("a") * num)) == toys.IDS[b"a"]
    assert chooser.choose(row, array(toys.ids("a") * 4)) == EOS  # and the minimum the end
    assert chooser.choose(np.full(VOCAB.size, -np.inf, np.float32), array([])) == toys.IDS[b"a"]  # or of the model
    longer = Chooser(decoding_params(grammar="regex:a*(b|3)*", min_new_tokens=3), VOCAB, 0)
    row[EOS] = 9
    assert longer.choose(row, array(toys.ids("a", "a"))) != EOS  # where there is another way, the minimum holds
    assert longer.choose(row, array(toys.ids("a", "a", "a"))) == EOS


@pytest.mark.parametrize(("schema", "kept", "left_out"), [
    # names of properties, and values, that are called as keywords are
    (same := {"properties": {"title": {"type": "string"}, "not": {"const": {"default": 1}}}}, same, set()),
    ({"$defs": {"a": {"title": "A"}}, "$ref": "#/$defs/a"}, {"$defs": {"a": {}}, "$ref": "#/$defs/a"}, set()),
    ({"anyOf": [{"not": {}}, {"uniqueItems": False, "default": 1}]}, {"anyOf": [{}, {}]}, {"not"}),
    ({"allOf": [{}], "unevaluatedProperties": False}, {"allOf": [{}]}, {"unevaluatedProperties"}),
    ({"patternProperties": {"^(?!a)": {}, "b": {}}}, {"patternProperties": {"b": {}}}, {"patternProperties"}),
    *(({"pattern": text}, {}, {"pattern"}) for text in (r"(?=a)", r"(?<!a)b", r"(a)\1", r"\bA", r"\\(?!a)")),
    *(({"pattern": text},) * 2 + (set(),) for text in (r"(?:a)", r"[(?=]", r"\(?=a", r"(\d?=)", r"(?<n>a)", "^a$")),
    ({"format": "cuid"}, {}, {"format"}),
])  # fmt: skip
def test_a_schema_is_freed_of_what_no_grammar_follows(schema: Any, kept: Any, left_out: set[str]) -> None:
    told = set[str]()
    assert (followable(schema, told), told) == (kept, left_out)


@pytest.mark.parametrize("ref", ["#/$defs/站", "#/$defs/%E7%AB%99"])
def test_references_may_be_written_in_any_language(ref: str) -> None:
    schema = {"type": "array", "items": {"$ref": ref}, "minItems": 1, "$defs": {"站": {"enum": ["上海", "北京"]}}}
    matched = along(json_schema(schema), BYTES)
    for text, fits in (('["上海"]', True), ('["上"]', False)):
        assert bool(matched.allowed(array(spelled(text)))[ENDS[0]]) is True
        assert bool(matched.allowed(array(spelled(text[:-1])))[spelled("]")[0]]) is fits


def test_a_vocabulary_without_an_end_has_no_grammar() -> None:
    with pytest.raises(GrammarRefused, match="no end token"):
        Chooser(DecodingParams(grammar=GRAMMARS[0]), toys.vocab(special_ids=[toys.TOOL], end_ids=[]), 0)


def test_without_llguidance_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependency, match=r"skydraft\[grammar\]"):
        Chooser(DecodingParams(grammar=GRAMMARS[0]), toys.vocab(), 0)
