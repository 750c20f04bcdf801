"""What a conversation says is read as characters: only the template's own marks are special tokens. And one that is far
too long is refused by its beginning: reading all of it takes seconds, which nothing can end."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel, ContextExceeded, PromptError
from skydraft.prompts.chat_template import render
from skydraft.prompts.messages import Message, asked
from skydraft.prompts.pair import prompt_ids

from .. import toys
from ..reading_marks import SPECIAL, encode, id_of, num_special, texts, vocab_with
from .test_chat_template import MODELS, TEMPLATES

KEYED = "{% for t in tools or [] %}{% for k in t %}<{{k}}>{{t[k]}}{% endfor %}{% endfor %}{{messages[0]['content']}}"


def conversation(question: str, answer: str, result: str, argument: str) -> list[Message]:
    call = {"id": "1", "type": "function", "function": {"name": f"f{argument}", "arguments": {argument: [argument]}}}
    return [
        Message("system", question), Message("user", question), Message("assistant", answer, (("tool_calls", [call]),)),
        Message("tool", result, (("tool_call_id", "1"), ("name", f"f{argument}"))), Message("assistant", answer),
        Message("user", result),
    ]  # fmt: skip


def tools_of(text: str) -> list[Any]:
    parameters = {"type": "object", "properties": {text: {"description": text, "enum": [text]}}}
    return [{"type": "function", "function": {"name": f"f{text}", "description": text, "parameters": parameters}}]


@pytest.mark.parametrize("model", MODELS)
@given(question=texts, answer=texts, result=texts, argument=texts, is_named=st.booleans())
@toys.law(40)
def test_no_text_is_a_special_token(
    model: str, question: str, answer: str, result: str, argument: str, is_named: bool
) -> None:
    """Nor is one that a tokenizer.json does not call special, but reads all the same."""
    vocab = vocab_with(TEMPLATES[model], SPECIAL if is_named else SPECIAL - {id_of("<|im_end|>")})
    said, plain = conversation(question, answer, result, argument), conversation("x", "x", "x", "x")
    read = 0
    # Not every template takes a system's turn, a tool's or a call.
    for chosen in (slice(0, None), slice(1, None), slice(1, 2), slice(1, 3), slice(4, None)):
        for tools, same in ((tools_of(argument), tools_of("x")), ([], [])):
            try:
                ids = prompt_ids(vocab, said[chosen], tools=tools)
                ids_of_x = prompt_ids(vocab, plain[chosen], tools=same)
            except (PromptError, BrokenModel):
                continue
            read += 1
            assert num_special(ids) == num_special(ids_of_x)
            assert vocab.written(ids) == render(vocab, said[chosen], tools)
    assert read


def test_a_name_between_the_brackets_of_a_template_makes_no_mark() -> None:
    vocab = vocab_with(KEYED)
    ids = prompt_ids(vocab, asked("hi"), tools=[{"|im_end|": "a", "im_end": "b", "s": "c", "/s": "d"}])
    assert num_special(ids) == 0 and bytes(ids) == b"<|im_end|>a<im_end>b<s>c</s>dhi"
    for template in ("<|{{ WORD }}|>", "<|{{ WORD | trim }}|>", "</{{ WORD }}>", "[{{ WORD }}]"):
        vocab = vocab_with(template.replace("WORD", "messages[0]['content']"))
        for text in ("im_end", " AUDIO ", "s", "INST", "/INST"):
            assert num_special(prompt_ids(vocab, asked(text))) == 0


def test_a_bare_text_and_recordings_are_read_as_marks_and_an_open_answer_is_not() -> None:
    vocab, audio = vocab_with(TEMPLATES["qwen2.5"]), id_of("<|AUDIO|>")
    assert num_special(prompt_ids(vocab, asked("a<|im_start|>b"), raw=True)) == 2  # and the BOS
    heard = Message("user", "What is <|AUDIO|>?", audio=(object(),))  # type: ignore[arg-type]
    assert prompt_ids(vocab, [heard], audio_ids=[(audio, audio)]).count(audio) == 2
    said, plain = (
        prompt_ids(vocab, [Message("user", "x"), Message("assistant", text, is_open=True)])
        for text in ("a<|im_end|>b", "x")
    )
    assert num_special(said) == num_special(plain) and bytes(said[-12:]) == b"a<|im_end|>b"


@pytest.mark.parametrize(("text", "most"), [("if (a < b || c > d) return; <b>|x|</b>", 1), ("<|im_end|>" * 20_000, 20)])
def test_texts_without_marks_are_encoded_in_one_piece_and_many_marks_as_one(text: str, most: int) -> None:
    seen, vocab = list[str](), vocab_with(TEMPLATES["qwen2.5"])
    vocab._encode = lambda text: seen.append(text) or encode(text)  # type: ignore[func-returns-value]
    ids = prompt_ids(vocab, asked(text))
    assert len(seen) <= most and num_special(ids) == num_special(prompt_ids(vocab, asked("x")))


@pytest.mark.parametrize("change", ["upper", "title", "capitalize", "trim", "tojson(ensure_ascii=True)"])
def test_what_a_template_does_to_a_text_shows_no_cut(change: str) -> None:
    vocab = vocab_with(f"<s>{{{{ messages[0]['content'] | {change} }}}}")
    asked_of = asked("say </s> and <|im_end|>")
    assert vocab.written(prompt_ids(vocab, asked_of)) == render(vocab, asked_of)


def test_values_that_are_nested_too_deep_are_refused() -> None:
    arguments: Any = {}
    for _ in range(900):
        arguments = {"a": arguments}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [Message("user", "x"), Message("assistant", "", (("tool_calls", [call]),)), Message("user", "x")]
    with pytest.raises(PromptError, match="nested too deep"):
        prompt_ids(vocab_with(TEMPLATES["qwen2.5"]), messages)


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
