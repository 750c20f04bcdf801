"""A grammar that the text follows, through llguidance: which tokens may come next is a function of the prefix.

What is asked for is text, so a token may come next when its bytes may, whatever other tokens would spell the same. Only
where there is a single way to go on, say through the name of a field, it is gone in the tokens that the vocabulary's
tokenizer would take. An end token may come exactly when the text is complete. Where the text has left the grammar (a
lossy rule, or tokens that another vocabulary reads otherwise), or no token can go on with it, only the end is left.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import array_api_compat
import numpy as np

from skydraft.characters import one_line
from skydraft.choosing.grammar_check import LIMITS, STACK_BYTES, complaint
from skydraft.choosing.incremental import Follower
from skydraft.engines.rows import namespace_of
from skydraft.engines.vocab import Mask, TokenIds, Vocab
from skydraft.errors import GrammarRefused, MissingDependency
from skydraft.grammars import parts, with_ascii_refs

_MAX_COMPILED = 16  # for each vocabulary; besides those in use
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
# A model that hesitates between a space and the next field could write spaces until its length ends.
_WHITESPACE = r"[ \n\t]{1,32}"
_lock = threading.Lock()  # of what is in `_known`, and of the size of stacks, which is one for the process


class Spelling:
    """What llguidance is told of a vocabulary. Special tokens and those that end a text have no bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab: Vocab) -> None:
        self.eos_token_id = min(vocab.end_ids)
        self.tokens = [b"" if i in vocab.end_ids else piece for i, piece in enumerate(vocab.pieces)]
        self.single = {piece[0]: token_id for token_id, piece in enumerate(self.tokens) if len(piece) == 1}
        self._vocab = ref(vocab)  # which owns, in the end, what asks this

    @property
    def has_all_bytes(self) -> bool:
        """Whether any text can be spelled."""
        return len(self.single) == 256

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell `text`: those of the vocabulary's tokenizer, or its bytes where that reads other things."""
        wanted, vocab = text.encode(), self._vocab()
        try:
            token_ids = list(vocab.encode(text)) if vocab else []
        except Exception:  # an engine that was closed; an error in a callback would end llguidance's work for good
            token_ids = []
        if b"".join(self.tokens[token_id] for token_id in token_ids) == wanted:
            return token_ids
        return [self.single[byte] for byte in wanted]


class CompiledGrammar:
    """A grammar over a vocabulary, from which matchers begin. From any thread."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._lock = threading.Lock()

    def matcher(self) -> Any:
        """A matcher of nothing yet."""
        with self._lock:
            return self._matcher.deep_copy()


class _Grammars:
    """The grammars compiled for one vocabulary, and what llguidance knows of it: some tenths of a second to build."""

    def __init__(self, vocab: Vocab) -> None:
        self._library = _llguidance()
        spelling = Spelling(vocab)
        self._may_force = spelling.has_all_bytes
        self._tokenizer = self._library.LLTokenizer(spelling, eos_token=sorted(vocab.end_ids))
        self._in_use: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        self._latest: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def recall(self, text: str) -> CompiledGrammar | None:
        """What was compiled before, now the latest. Under the lock."""
        if (compiled := self._in_use.get(text)) is not None:
            self.keep(text, compiled)
        return compiled

    def keep(self, text: str, compiled: CompiledGrammar) -> None:
        """Keep it among the latest. Under the lock."""
        self._in_use[text] = self._latest[text] = compiled
        self._latest.move_to_end(text)
        while len(self._latest) > _MAX_COMPILED:
            self._latest.popitem(last=False)

    def compile(self, text: str) -> CompiledGrammar:
        """Raises GrammarRefused, with the reason in one line."""
        grammar = self._library.LLMatcher.grammar_from_lark(_as_lark(text, self._library, may_force=self._may_force))
        if reason := complaint(grammar):
            raise _refused(text, reason)
        limits = self._library.LLParserLimits(**LIMITS)
        matcher = _on_a_large_stack(
            lambda: self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        )
        if matcher.is_error():
            raise _refused(text, matcher.get_error())
        return CompiledGrammar(matcher)


_known: WeakKeyDictionary[Vocab, _Grammars] = WeakKeyDictionary()


def compile_grammar(text: str, vocab: Vocab) -> CompiledGrammar:
    """The grammar over a vocabulary; the same again while anybody holds it or it is among the latest. From any thread.

    `text` is one that `DecodingParams` has taken. Takes up to about two seconds. Raises GrammarRefused for what does
    not compile, or a vocabulary without an end; MissingDependency where llguidance is not installed.
    """
    if not vocab.end_ids:
        raise GrammarRefused("This model has no end token, so no text of a grammar could end.")
    with _lock:
        grammars = _known.get(vocab)
        if grammars is None:
            grammars = _known[vocab] = _Grammars(vocab)
        if (compiled := grammars.recall(text)) is not None:
            return compiled
    compiled = grammars.compile(text)
    with _lock:
        grammars.keep(text, compiled)
    return compiled


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependency(
            "A grammar needs llguidance.", hint="Install it with: pip install 'skydraft[grammar]'."
        ) from error
    return llguidance


def _as_lark(text: str, library: Any, *, may_force: bool) -> str:
    """A grammar of any kind in Lark. Where not every text can be spelled, no tokens are taken for the only way."""
    kind, content = parts(text)
    if kind == "json_schema":
        schema = with_ascii_refs(content)
        schema.setdefault("x-guidance", {"whitespace_pattern": _WHITESPACE})
        content = f"start: %json {json.dumps(schema)}"
    elif kind == "regex":
        content = json.loads(library.LLMatcher.grammar_from_regex(content))["grammars"][0]["lark_grammar"]
    return content if may_force else content + '\n%llguidance {"no_forcing": true}\n'  # the last one holds


def _refused(text: str, reason: str) -> GrammarRefused:
    """`reason` is llguidance's, which goes on with the place, counted in Lark, and its own state."""
    if _first_line(reason) in _DEAD_ENDS:
        return GrammarRefused("The grammar does not compile: no text follows it.")
    said = re.split(r"\n\s*\d+ \| |<state>|<non-verbose/>", reason)[0]
    if not text.startswith("lark:"):
        said = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said)
    return GrammarRefused(f"The grammar does not compile: {one_line(said)[:300].strip().rstrip('.')}.")


def _on_a_large_stack(work: Callable[[], Any]) -> Any:
    """What `work` returns, in a thread that can follow deep grammars down."""
    found: list[Any] = []
    with _lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: found.append(work()))
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return found[0]


class GrammarAlong(Follower):
    """A matcher that goes along the generated part of prefixes, and back. For one thread at a time."""

    def __init__(self, compiled: CompiledGrammar, vocab: Vocab, prompt_len: int) -> None:
        super().__init__()
        self._compiled = compiled
        self._matcher = compiled.matcher()
        self._prompt_len = prompt_len
        self._size = vocab.size
        self._end_ids = np.array(sorted(vocab.end_ids))
        self._num_matched = 0  # tokens that the matcher has taken: all, until the text leaves the grammar
        self._mask: Mask | None = None

    def allowed(self, prefix: TokenIds) -> Mask:
        """Which tokens may follow `prefix`, [vocab]: at least one. Valid until the next question.

        Raises GrammarRefused where finding out takes too much.
        """
        self.follow(prefix[self._prompt_len :])
        if self._mask is None:
            self._mask = self._find()
        return self._mask

    def forced(self, prefix: TokenIds) -> int | None:
        """The only token that may follow `prefix`, if there is just one."""
        mask = self.allowed(prefix)
        return int(mask.argmax()) if np.count_nonzero(mask) == 1 else None

    def masked(self, row: Any, prefix: TokenIds) -> Any:
        """A copy of `row` [vocab] with -inf for all that may not follow; where the model itself rules out all that may,
        these are alike."""
        xp, allowed = namespace_of(row), self.allowed(prefix)
        mask = xp.asarray(allowed, device=array_api_compat.device(row))
        masked = xp.where(mask, row, xp.full_like(row[:1], -xp.inf))
        if float(masked.max()) == -float("inf"):
            masked[mask] = 0
        return masked

    def _find(self) -> Mask:
        mask = np.zeros(self._size, bool)
        if self._num_matched == len(self._read):
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                self._leave_dead_end()
            else:
                mask = np.unpackbits(bits, count=self._size, bitorder="little").view(bool)
                mask[self._end_ids] = self._matcher.is_accepting()
        if not mask.any():
            mask[self._end_ids] = True
        return mask

    def _leave_dead_end(self) -> None:
        """Come back to where the matcher was before it found that nothing may follow. Raises GrammarRefused."""
        told = self._matcher.get_error()
        self._matcher = self._compiled.matcher()
        num_matched = self._matcher.try_consume_tokens(self._read.view.tolist())
        if _first_line(told) not in _DEAD_ENDS or num_matched < self._num_matched:
            raise self._too_much(told)

    def _too_much(self, told: str) -> GrammarRefused:
        """What to raise for an error of the matcher, which never leaves it: the next question begins with another."""
        self._matcher, self._num_matched, self._mask = self._compiled.matcher(), 0, None
        self._read.truncate(0)
        return GrammarRefused(f"The grammar cannot be followed any further: {_first_line(told)}.")

    def _back(self, length: int) -> None:
        if length < len(self._read):
            self._mask = None
        if length < self._num_matched:
            if not self._matcher.rollback(self._num_matched - length):
                raise self._too_much(self._matcher.get_error())
            self._num_matched = length

    def _on(self, token_ids: TokenIds) -> None:
        if len(token_ids):
            self._mask = None
        if self._num_matched < len(self._read):
            return
        ends = np.flatnonzero(np.isin(token_ids, self._end_ids))
        inside = token_ids[: ends[0]] if len(ends) else token_ids
        self._num_matched += self._matcher.try_consume_tokens(inside.tolist())
        if self._matcher.is_error():
            raise self._too_much(self._matcher.get_error())


def _first_line(told: str) -> str:
    return one_line(told.split("\n")[0].split("<")[0])[:200].strip().rstrip(".")
