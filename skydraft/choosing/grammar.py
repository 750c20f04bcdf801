"""A grammar that the text follows, through llguidance: the prefix alone decides which tokens may come next.

A token is allowed if its bytes are, even if other tokens spell the same text. If the text has only one continuation, as
inside a field name, only the tokenizer's own token is allowed. An end token is allowed exactly when the text is
complete. Only the end is allowed if no token can continue the text, or if it has left the grammar: by a lossy rule, or
a vocabulary that reads tokens differently.

A child process first tests whether a grammar compiles. llguidance bounds most of its work, but some intersections of
patterns take minutes, and deep nesting can crash the process.
"""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt

from skydraft.characters import one_line
from skydraft.choosing.incremental import Follower
from skydraft.engines.vocab import Mask, TokenIds, Vocab, kept_with_vocab
from skydraft.errors import GrammarRefused, importing
from skydraft.grammars import parts, with_ascii_refs

_MAX_COMPILED = 16  # for each vocabulary
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
# A model that hesitates between a space and the next field could write spaces up to its length limit.
_WHITESPACE = r"[ \n\t]{1,32}"
_MARKS = ("<tool_call>", "</tool_call>")  # a tokenizer that knows them makes one token, whatever follows
# Arguments of llguidance's LLParserLimits, here and in the child. A matcher's step takes some milliseconds at most.
LIMITS: dict[str, int | bool] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 32_768,  # 1 to 2 KB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
STACK_BYTES = 256 * 2**20  # nested rules recurse deeply; only used pages take memory
_SECONDS, _WALL_S, _BYTES = 1, 20, 2**30
_ENDS = [getattr(signal, name, None) for name in ("SIGXCPU", "SIGSEGV", "SIGABRT", "SIGBUS")]  # the grammar's fault
# The child uses llguidance's byte vocabulary, so that the result holds for every model.
_CHILD = f"""
import json, os, sys, threading
import llguidance
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS} + 1))
    resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
except (ImportError, OSError, ValueError, AttributeError):
    pass
request = json.load(sys.stdin)

def check():
    tokenizer = llguidance.LLTokenizer("byte", slices=[])
    limits = llguidance.LLParserLimits(**request["limits"])
    matcher = llguidance.LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    print(json.dumps(matcher.get_error()))

threading.stack_size({STACK_BYTES})
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""
_lock = threading.Lock()  # guards the cache of `_of`, and the stack size, which is global


class Spelling:
    """A vocabulary as llguidance reads it. Special tokens and end tokens have no bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab: Vocab) -> None:
        self.eos_token_id = min(vocab.end_ids)
        self.tokens = [b"" if i in vocab.end_ids else piece for i, piece in enumerate(vocab.pieces)]
        self.single = {piece[0]: token_id for token_id, piece in enumerate(self.tokens) if len(piece) == 1}
        self._vocab = ref(vocab)  # weak, since the vocabulary keeps this object

    def __call__(self, text: str) -> list[int]:
        """Tokenize `text` with the vocabulary's tokenizer, or byte by byte if that changes the text."""
        wanted, vocab = text.encode(), self._vocab()
        with suppress(Exception):  # a closed engine; llguidance does not survive an error here
            token_ids = list(vocab.encode(text)) if vocab else []
            if b"".join(self.tokens[token_id] for token_id in token_ids) == wanted:
                return token_ids
        return [self.single[byte] for byte in wanted]


class CompiledGrammar:
    """A grammar compiled for a vocabulary; any thread may take matchers. `marks` maps bytes to token ids."""

    def __init__(self, matcher: Any, marks: dict[bytes, int]) -> None:
        self.marks, self._matcher, self._lock = marks, matcher, threading.Lock()

    def matcher(self) -> Any:
        with self._lock:
            return self._matcher.deep_copy()


class _Grammars:
    """Grammars of one vocabulary, and its llguidance tokenizer, which takes 0.3 s to build."""

    def __init__(self, vocab: Vocab) -> None:
        with importing("A grammar needs", "grammar"):
            import llguidance
        self._library = llguidance
        spelling = Spelling(vocab)
        self._may_force = len(spelling.single) == 256  # any text can be spelled
        spelled = {mark.encode(): spelling(mark) for mark in _MARKS if self._may_force}
        self._marks = {mark: token_ids[0] for mark, token_ids in spelled.items() if len(token_ids) == 1}
        self._tokenizer = self._library.LLTokenizer(spelling, eos_token=sorted(vocab.end_ids))
        self.compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def _compile(self, text: str) -> CompiledGrammar:
        grammar = self._library.LLMatcher.grammar_from_lark(_as_lark(text, self._library, may_force=self._may_force))
        if reason := complaint(grammar):
            raise _refused(text, reason)
        limits = self._library.LLParserLimits(**LIMITS)
        make = self._library.LLMatcher
        matcher = _on_a_large_stack(lambda: make(self._tokenizer, grammar, log_level=0, limits=limits))
        if matcher.is_error():
            raise _refused(text, matcher.get_error())
        return CompiledGrammar(matcher, self._marks)


_of = kept_with_vocab(_Grammars)


def compile_grammar(text: str, vocab: Vocab) -> CompiledGrammar:
    """Compile a grammar that `DecodingParams` accepted, within about two seconds, or return it from the cache.

    Any thread may call this. Raises GrammarRefused, or MissingDependency if llguidance is not installed.
    """
    if not vocab.end_ids:
        raise GrammarRefused("This model has no end token, so a text with a grammar could not end.")
    with _lock:
        grammars = _of(vocab)
    return grammars.compiled(text)


@lru_cache(maxsize=128)
def complaint(grammar: str) -> str:
    """Return why `grammar`, in llguidance's own form, does not compile; "" if it does. Raises GrammarRefused.

    Takes a tenth of a second, and at most about one second of processor time.
    """
    request = json.dumps({"grammar": grammar, "limits": LIMITS}).encode()
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _CHILD], input=request, capture_output=True, timeout=_WALL_S)
        if -done.returncode in _ENDS:
            return f"it takes more than {_SECONDS} s, or too much memory"
        return str(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        # The child could not start or was killed, which says nothing about the grammar. Errors are not cached.
        raise GrammarRefused("The grammar could not be checked: no memory or time.", hint="Try later.") from error


def _as_lark(text: str, library: Any, *, may_force: bool) -> str:
    """Translate a grammar to Lark. Unless `may_force`, llguidance forces no tokens."""
    kind, content = parts(text)
    if kind == "json_schema":
        schema = with_ascii_refs(content)
        schema.setdefault("x-guidance", {"whitespace_pattern": _WHITESPACE})
        content = f"start: %json {json.dumps(schema)}"
    elif kind == "regex":
        content = json.loads(library.LLMatcher.grammar_from_regex(content))["grammars"][0]["lark_grammar"]
    return content if may_force else content + '\n%llguidance {"no_forcing": true}\n'  # the last option wins


def _refused(text: str, reason: str) -> GrammarRefused:
    """Return the error for llguidance's `reason`, without line numbers in Lark and internal state."""
    reason = re.split(r"\n\s*\d+ \| |<state>|<non-verbose/>", reason)[0]
    if _first_line(reason) in _DEAD_ENDS:
        reason = "no text follows it"
    if reason.startswith("panic"):  # the rest is about llguidance's own code
        reason = "llguidance fails at it. A grammar cannot name special tokens (<|im_end|>)"
    if not text.startswith("lark:"):
        reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", reason)
    return GrammarRefused(f"The grammar does not compile: {one_line(reason)[:300].strip().rstrip('.')}.")


def _on_a_large_stack(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        with _lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                result = pool.submit(work)
            finally:
                threading.stack_size(before)
        return result.result()


class GrammarAlong(Follower):
    """A matcher that follows the generated part of prefixes, forward and back. For one thread at a time."""

    def __init__(self, compiled: CompiledGrammar, vocab: Vocab, prompt_len: int) -> None:
        super().__init__()
        self._compiled, self._matcher, self._prompt_len = compiled, compiled.matcher(), prompt_len
        self._size, self._end_ids = vocab.size, np.array(sorted(vocab.end_ids))
        self._num_matched = 0  # tokens that the matcher has taken: all until the text leaves the grammar
        self._mask: Mask | None = None

    def allowed(self, prefix: TokenIds) -> Mask:
        """Return the mask [vocab] of tokens that may follow `prefix`, at least one. Valid until the next call.

        Raises GrammarRefused if that takes too much work.
        """
        self.follow(prefix[self._prompt_len :])
        if self._mask is None:
            self._mask = self._find()
        return self._mask

    @property
    def was_left(self) -> bool:
        return self._num_matched < self.length

    def _find(self) -> Mask:
        mask = np.zeros(self._size, bool)
        if self._num_matched == self.length:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if self._matcher.is_error():
                self._leave_dead_end()
            else:
                mask = np.unpackbits(bits, count=self._size, bitorder="little").view(bool)
                mask[self._end_ids] = self._matcher.is_accepting()
                self._force_mark(mask)
        if not mask.any():
            mask[self._end_ids] = True
        return mask

    def _force_mark(self, mask: Mask) -> None:
        """If a mark must come, allow only its token: llguidance also allows parts of it if more text could follow."""
        marks = self._compiled.marks
        ahead = self._matcher.compute_ff_bytes() if marks else b""
        for token_id in (token_id for mark, token_id in marks.items() if ahead.startswith(mark)):
            mask[:] = False
            mask[token_id] = True

    def _leave_dead_end(self) -> None:
        """Rebuild the matcher after a dead end. Raises GrammarRefused for any other error."""
        reason = self._matcher.get_error()
        self._matcher = self._compiled.matcher()
        num_matched = self._matcher.try_consume_tokens(self.token_ids.tolist())
        if _first_line(reason) not in _DEAD_ENDS or num_matched < self._num_matched:
            raise self._too_much(reason)

    def _too_much(self, reason: str) -> GrammarRefused:
        self._matcher, self._num_matched, self._mask = self._compiled.matcher(), 0, None
        self._cut(0)
        return GrammarRefused(f"The grammar cannot be followed any further: {_first_line(reason)}.")

    def _back(self, length: int) -> None:
        if length < self.length:
            self._mask = None
        if length < self._num_matched:
            if not self._matcher.rollback(self._num_matched - length):
                raise self._too_much(self._matcher.get_error())
            self._num_matched = length

    def _on(self, token_ids: TokenIds) -> None:
        if len(token_ids):
            self._mask = None
        if self._num_matched < self.length:
            return
        ends = np.flatnonzero(np.isin(token_ids, self._end_ids))
        inside = token_ids[: ends[0]] if len(ends) else token_ids
        self._num_matched += self._matcher.try_consume_tokens(inside.tolist())
        if self._matcher.is_error():
            raise self._too_much(self._matcher.get_error())


def masked(row: npt.NDArray[Any], allowed: Mask) -> npt.NDArray[Any]:
    """Return a copy of `row` [vocab] with -inf for forbidden tokens; if all allowed ones have -inf, they become 0."""
    copy = np.where(allowed, row, row.dtype.type(-np.inf))
    if copy.max() == -np.inf:
        copy[allowed] = 0
    return copy


def only_one(mask: Mask) -> int | None:
    return int(mask.argmax()) if np.count_nonzero(mask) == 1 else None


def _first_line(reason: str) -> str:
    return one_line(reason.split("\n")[0].split("<")[0])[:200].strip().rstrip(".")
