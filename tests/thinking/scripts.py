"""Models that think what a test says, and minimal templates that behave as those of published models do."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from skydraft.engines.toy import ToyEngine, character_vocab, random_toy
from skydraft.engines.vocab import Vocab

_CHARS = [chr(code) for code in range(32, 127)] + ["\n", *"快慢高低在我你"]
# The branches of Qwen3: switched off by a variable; the history keeps thoughts after the last question alone.
SWITCHED = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n\n{% endif %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n"
    "</tool_call>{% endfor %}[end]{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# DeepSeek-R1's distilled ones open the thinking themselves and cut it out of the history.
OPENED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
# Hermes: a variable adds a system prompt, and the model opens the thinking.
ASKED = (
    "{% if thinking %}[system]Think inside <think> </think>.[end]{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LEVELLED = "{{ reasoning_effort }}" + OPENED
TEMPLATES = {"switched": SWITCHED, "opened": OPENED, "asked": ASKED}


def vocab_of(template: str = SWITCHED, words: Seq[str] = ("<think>", "</think>"), special: bool = False) -> Vocab:
    """Without `words` the tags are spelled by characters."""
    made = character_vocab((*_CHARS, *words))
    marks = [made.encode(word)[0] for word in words] if special else []
    return Vocab(
        made._names, made._encode, special_ids=[*marks, made.size - 1], end_ids=[made.size - 1],
        chat_template=template, eos_text="<eos>",
    )  # fmt: skip


class Scripted(ToyEngine):
    """Writes `script` after the last [assistant] of its prompt, then ends; each `slip`th token it would write a z."""

    def __init__(self, script: str, vocab: Vocab, slip: int = 0, **options: Any) -> None:
        super().__init__(vocab, np.zeros((vocab.size, vocab.size), np.float32), **options)
        self.script, self.slip = script, slip

    def _row(self, cache: list[tuple[int, int]]) -> Any:
        written = self.vocab.written(token_id for token_id, _ in cache)
        done = written.rpartition("[assistant]")[2]
        rest = self.script.removeprefix(done) if self.script.startswith(done) else ""
        if done and not rest and self.script != done:  # the prompt opened the thinking, or the draft slipped
            begun = done.removeprefix("<think>\n")
            rest = self.script[len(begun) :]
        token_id = self.vocab.encode(rest)[0] if rest else self.vocab.size - 1
        row = np.linspace(0, 1, self.vocab.size, dtype=np.float32)
        is_slip = self.slip and len(cache) % self.slip == 0
        row[self.vocab.encode("z")[0] if is_slip else token_id] = 20
        return row


def pair_of(script: str, template: str = SWITCHED, slip: int = 5, **options: Any) -> tuple[Scripted, Scripted]:
    vocab = vocab_of(template, **options)
    return Scripted(script, vocab, slip), Scripted(script, vocab)


def thinking_toy(drift: float = 0.0, max_sequences: int = 1) -> ToyEngine:
    """A random model, see `random_toy`, whose answers begin with thinking."""
    words = ("<think>", "</think>", "[assistant]")
    vocab = vocab_of(words=words)
    start, end, turn = (vocab.encode(word)[0] for word in words)
    toy = random_toy(vocab, drift=drift, name=f"thinks, drift {drift}")
    toy.max_sequences = max_sequences
    row_of = toy._row

    def thinking(cache: list[tuple[int, int]]) -> Any:
        text = [token_id for token_id, _ in cache]
        text = text[len(text) - text[::-1].index(turn) :] if turn in text else [start, end]
        row = row_of(cache).copy()
        row[[start, turn, end]] = -1e2
        if not text:
            row[start] = 1e2
        elif start in text and end not in text and len(text) > 8:
            row[end] = 15.0  # more than most rows have
        return row

    toy._row = thinking  # type: ignore[method-assign]
    return toy
