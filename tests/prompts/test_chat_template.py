"""Chat templates: rendered as transformers renders them, and one clear line where they cannot be; and system messages
anywhere in a conversation: every template reads them, in their order, or a word says why not."""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError

from skydraft.engines.toy import open_toy
from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel, PromptError
from skydraft.prompts import chat_template
from skydraft.prompts.chat_template import render
from skydraft.prompts.messages import Message, asked, conversation
from skydraft.prompts.pair import beginning_ids, prompt_ids
from skydraft.prompts.systems import readable
from skydraft.prompts.tool_calls import writes_calls
from tests.toys import law

Reference = Callable[[str, Sequence[Message]], str]

NOW = datetime(2031, 3, 9, 14, 5)
BOS, EOS = "<|bos|>", "<|eos|>"
MODELS = ["deepseek-r1-distill", "gemma", "llama-3.1", "llama-3.2", "mistral-7b-v0.1", "phi-3", "qwen2.5", "qwen3"]
TEMPLATES = {model: (Path(__file__).parent / "templates" / f"{model}.jinja").read_text("utf-8") for model in MODELS}
SYSTEM, QUESTION = Message("system", " Be brief.\n"), Message("user", "Why is the sky blue?")
ANSWER, FOLLOW_UP = Message("assistant", "<think>\nLight.\n</think>\n\nIt scatters."), Message("user", "And at night?")

CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "question": (QUESTION,),
    "system": (SYSTEM, QUESTION),
    "system and follow-up": (SYSTEM, QUESTION, ANSWER, FOLLOW_UP),
    "Chinese": asked("请用一句话解释：天空为什么是蓝色的？", "你是一个有帮助的助手。"),
    "markup": asked("""if (a < b && c > d) { s = "it's" + '\\n'; }  <b>{{ messages }}</b> {% raw %} """),
    "control tokens": asked("<|im_end|>\n<|im_start|>system\n<start_of_turn>"),
    "tool": (QUESTION, Message("tool", '{"hour": 23}')),
}


def vocab_with(template: str | None, bos: str = BOS, tools: str | None = None) -> Vocab:
    return Vocab([b"a"], lambda _: [], chat_template=template, tool_template=tools, bos_text=bos, eos_text=EOS)


def bytes_vocab(template: str | None) -> Vocab:
    """One token a byte, but for pairs of line ends, which are one."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"\n\n"]

    def encode(text: str) -> list[int]:
        return [256 if part == b"\n\n" else part[0] for part in re.findall(rb"\n\n|.", text.encode(), re.S)]

    return Vocab(pieces, encode, chat_template=template, bos_text="<s>", eos_text="</s>")


def rendered(template: str, *messages: Message) -> str:
    return render(vocab_with(template), messages or (QUESTION,))


def turns_of(places: list[int]) -> list[Message]:
    """Turns of a user and an assistant; the last one is the user's."""
    told = list[Message]()
    for number, num_systems in enumerate(places[: len(places) - 1 + len(places) % 2] or [0]):
        told += [Message("system", f"S{number}-{each}") for each in range(num_systems)]
        told.append(Message("assistant" if number % 2 else "user", f"T{number}"))
    return told


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_now", lambda: NOW)


@pytest.fixture
def by_transformers(monkeypatch: pytest.MonkeyPatch) -> Reference:
    pytest.importorskip("transformers")
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: NOW))

    def reference(template: str, messages: Sequence[Message]) -> str:
        told = [{"role": message.role, "content": message.content} for message in messages]
        given = {"chat_template": template, "add_generation_prompt": True, "bos_token": BOS, "eos_token": EOS}
        (text,), _ = chat_template_utils.render_jinja_template([told], **given)
        return str(text)

    return reference


# On which a renderer of its own would differ from transformers.
SNIPPETS = {
    "tojson keeps what HTML would escape": "{{ '<b>&amp; 中文 😀' | tojson }}",
    "tojson indents": "{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", "a message": "{{ messages[0] | tojson }}",
    "break": "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "generation": "{% for i in 'xy' %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "its names": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "clock": "{{ strftime_now('%d %b %Y, %H:%M') }}", "undefined is empty": "[{{ pad_token }}]",
    "blocks": "{% if true %}\n    {% set a = 1 %}\n  a\n{% endif %}\n",
    "no tools": "{{ tools is none }} {{ documents is none }} {{ thinking is defined }}",
    "namespace": "{% set n = namespace({'a': 1}, b=2) %}{% set n.c = n.a + n.b %}{{ n.c }}",
    "dict": "{{ dict([('a', 1)], b=2) }}",
}  # fmt: skip
SAME = {f"{model}, {told}": (TEMPLATES[model], CONVERSATIONS[told]) for model in MODELS for told in CONVERSATIONS}
SAME |= {name: (snippet + "{{ messages[0].content }}", (QUESTION,)) for name, snippet in SNIPPETS.items()}


@pytest.mark.parametrize(("template", "messages"), SAME.values(), ids=SAME)
def test_as_transformers_renders(template: str, messages: tuple[Message, ...], by_transformers: Reference) -> None:
    try:
        expected = by_transformers(template, messages)
    except TemplateError as refusal:
        with pytest.raises(PromptError) as caught:
            rendered(template, *messages)
        assert str(refusal) in caught.value.message
    else:
        assert rendered(template, *messages) == expected


# Templates that no model should have.
BROKEN = {
    "does not compile": "{% if %}",
    "undefined attribute": "{{ messages[0].tool_calls[0].name }}",
    "arithmetic": "{{ 'a' + 1 }}",
    "a change of a message": "{% set _ = messages.append(1) %}",
    "a change through the type": "{% set _ = dict.update(messages[0], role='system') %}",
    "a way to Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a hidden name": "{% set n = namespace() %}{% set n._a = 1 %}",
    "a hidden name at once": "{% set n = namespace(__class__=1) %}",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_template(fault: str) -> None:
    with pytest.raises(BrokenModel) as caught:
        rendered(BROKEN[fault])
    assert caught.value.message.startswith("The chat template of this model fails: ")
    assert "raw" in caught.value.hint and "\n" not in str(caught.value)


def test_a_refusal_in_the_words_of_the_template() -> None:
    template = "{{ raise_exception('Only\n  one question, ' + messages[-1].role + '!') }}"
    with pytest.raises(PromptError) as caught:
        rendered(template)
    assert str(caught.value) == "The chat template refuses this conversation: Only one question, user!"
    with pytest.raises(PromptError, match=r"user! Try it without the system message\.$"):
        rendered(template, SYSTEM, QUESTION)


@pytest.mark.parametrize("messages", [(SYSTEM, QUESTION), (SYSTEM,), (ANSWER,), (QUESTION, ANSWER, FOLLOW_UP)])
def test_more_than_a_question_without_a_template(messages: tuple[Message, ...]) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        render(vocab_with(None), messages)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", ["", " Light, ", "It\n", "<|im_end|>", "{{ x }}"])
def test_an_open_message_ends_the_text(model: str, text: str) -> None:
    vocab = vocab_with(TEMPLATES[model])
    closed = render(vocab, (QUESTION, Message("assistant", text)))
    opened = render(vocab, (QUESTION, Message("assistant", text, is_open=True)))
    assert opened.endswith(text.lstrip()) and closed.startswith(opened.rstrip()) and opened != closed


# Some take the words of a message in a list of parts alone: (template, text of the conversation below).
IN_PARTS = {
    "a loop": ("{% for m in messages %}{{ m['role'] }}:{% for c in m['content'] %}{% if c['type'] == 'text' %}"
               "{{ c['text'] }}{% endif %}{% endfor %};{% endfor %}"),
    "the first": "{% for m in messages %}{{ m.role + ':' + m.content[0].text + ';' }}{% endfor %}",
    "filtered": ("{% for m in messages %}{{ m.role }}:{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
                 "{{ c.text }}{% endfor %};{% endfor %}"),
}  # fmt: skip


@pytest.mark.parametrize("template", IN_PARTS.values(), ids=IN_PARTS)
def test_a_template_that_takes_parts_gets_them(template: str) -> None:
    told = [SYSTEM, QUESTION, Message("assistant", "It sc", is_open=True)]
    text = f"system:{SYSTEM.content};user:{QUESTION.content};assistant:It sc"
    for vocab, tools in ((vocab_with(template), []), (vocab_with("-", tools=template), [chat_template.ANY_TOOL])):
        assert render(vocab, told, tools) == text
    assert bytes(prompt_ids(bytes_vocab(template), [QUESTION])) == f"user:{QUESTION.content};".encode()


@pytest.mark.parametrize("part", ["", "{% for c in m.content %}{{ c.image }}{% endfor %}", "{{ m.content[0].words }}"])
def test_a_template_without_the_words_of_the_user_is_broken(part: str) -> None:
    template = f"{{% for m in messages %}}{{{{ m.role }}}}{part}{{% endfor %}}"
    with pytest.raises(BrokenModel, match=r"fails: it leaves out the user's words\. Use raw"):
        prompt_ids(bytes_vocab(template), [SYSTEM, QUESTION])


def test_requests_with_tools_have_a_template_of_their_own_where_a_model_has_one() -> None:
    chat, tools = (f"{{% for m in messages %}}{name}:{{{{ m.content }}}}{{% endfor %}}" for name in ("chat", "tools"))
    vocab = vocab_with(chat, tools=f"{{% if messages[0].role == 'system' %}}{{{{ 1 + '' }}}}{{% endif %}}{tools}")
    told = [SYSTEM, QUESTION]
    assert render(vocab, readable(vocab, told)) == "".join(f"chat:{each.content}" for each in told)
    text = render(vocab, readable(vocab, told, [chat_template.ANY_TOOL]), [chat_template.ANY_TOOL])
    assert text == f"tools:{SYSTEM.content}\n\n{QUESTION.content}"
    assert not writes_calls(vocab) and writes_calls(vocab_with(chat, tools="<tool_call> tools"))
    assert render(vocab_with(None, tools=tools), [QUESTION]) == f"tools:{QUESTION.content}"


def test_a_slip_in_a_template_is_mended_so_that_a_pair_reads_the_same() -> None:
    right = TEMPLATES["qwen2.5"]
    example = '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}'
    assert example in right
    slipped, tools = right.replace(example, f"{{{example}}}"), [{"type": "function", "function": {"name": "f"}}]
    text = render(vocab_with(slipped), (QUESTION,), tools)
    assert text == render(vocab_with(right), (QUESTION,), tools) and '\n{"name": <function-name>' in text


def test_arguments_of_calls_have_the_form_that_a_template_takes_also_cut_ones() -> None:
    told = ('{"a": "b', '{"a": "上"}')
    calls = [{"type": "function", "function": {"name": "f", "arguments": each}} for each in told]
    messages = conversation([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}])
    each = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ SAID }}{% endfor %}{{ m.content }}{% endfor %}"
    for said, expected in (
        ("c.function.arguments", "{\"a\": \"b{'a': '上'}"),
        ("c.function.arguments|items|list|tojson", '[["", "{\\"a\\": \\"b"]][["a", "上"]]'),
        ("'!' + c.function.arguments", '!{"a": "b!{"a": "上"}'),  # as DeepSeek's templates do
    ):
        assert render(vocab_with(each.replace("SAID", said)), messages) == f"a{expected}"


def test_no_such_message() -> None:
    calls = (("tool_calls", [{"function": {}}]),)
    for role, more in (("user", ()), ("tool", ()), ("assistant", calls)):
        with pytest.raises(PromptError, match="Only text of the assistant"):
            Message(role, "a", more, is_open=True)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="'bot'"):
        Message("bot", "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("model", MODELS)
def test_every_lone_question_begins_alike_on_any_day(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('no') }}", "{{ messages[0]['content'] }}", "ab{{ messages[0]['content'] }}"]
)
def test_no_template_or_a_short_beginning_is_none(template: str | None) -> None:
    assert beginning_ids(bytes_vocab(template)) == () == beginning_ids(open_toy("toy").vocab)


# As Qwen 3.5: a later system message is refused.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
VOCABS = {name: vocab_with(template) for name, template in {**TEMPLATES, "strict": STRICT}.items()}
turns = st.lists(st.integers(0, 2), min_size=1, max_size=6)  # how many system messages come before each turn


@pytest.mark.parametrize("name", VOCABS)
@law(30)
@given(turns)
def test_every_message_is_read_once_and_in_its_order(name: str, places: list[int]) -> None:
    messages = turns_of(places)
    text = render(VOCABS[name], readable(VOCABS[name], messages))
    at = [text.index(message.content) for message in messages]
    assert at == sorted(at) and all(text.count(message.content) == 1 for message in messages)


@pytest.mark.parametrize("name", VOCABS)
def test_a_conversation_that_grows_keeps_its_beginning(name: str) -> None:
    said = [Message("system", "S"), Message("user", "a"), Message("system", "R"), Message("assistant", "b")]
    more = [*said, Message("user", "c"), Message("system", "Q"), Message("assistant", "d"), Message("user", "e")]
    before, after = (readable(VOCABS[name], messages) for messages in (said, more))
    assert after[: len(before)] == before and readable(VOCABS[name], more[1:2]) == more[1:2]


def test_what_a_template_reads_stays_as_it_is() -> None:
    messages = turns_of([2, 0, 1])
    assert readable(VOCABS["qwen2.5"], messages) == messages
    assert [each.role for each in readable(VOCABS["strict"], messages)].count("system") == 1
    assert readable(vocab_with(None), messages) == messages


def test_no_system_message_is_put_into_the_mouth_of_an_assistant() -> None:
    said = {role: Message(role, text) for role, text in (("assistant", "A"), ("system", "S"), ("user", "U"))}
    begins, ends = [said["assistant"], said["system"]], [said["system"], Message("assistant", "B", is_open=True)]
    assert readable(VOCABS["gemma"], begins) == [said["assistant"], Message("user", "S")]
    assert readable(VOCABS["strict"], [*begins, said["user"]]) == [said["assistant"], Message("user", "S\n\nU")]
    for name in ("strict", "gemma"):
        for before in ([], [said["user"], said["assistant"]]):
            told = readable(VOCABS[name], [*before, *ends])
            assert told[-1] == ends[-1] and render(VOCABS[name], told).endswith("B")
            assert [each.content for each in told] == [each.content for each in [*before, *ends]]
