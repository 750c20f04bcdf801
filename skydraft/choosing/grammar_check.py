"""Whether a grammar compiles, found out in a process of its own, which may take a second and a gigabyte.

llguidance bounds most of its work, but not all: some intersections of patterns take minutes, and what is deep can end
the process. Whoever may send a grammar to a server could stop it so; here a child ends, and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache

from skydraft.errors import GrammarRefused

# Arguments of llguidance's LLParserLimits, here and there. A step of a matcher ends within some milliseconds.
LIMITS: dict[str, int | bool] = {
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 32_768,  # 1 to 2 KB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
STACK_BYTES = 256 * 2**20  # rules that name rules are followed down; only what is used is ever there
_SECONDS, _WALL_S, _BYTES = 1, 20, 2**30
# The vocabulary is that of all bytes, so that this says nothing of a model.
_CHILD = f"""
import json, os, sys, threading
import llguidance
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
    resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(10)
except (ImportError, OSError, ValueError, AttributeError):
    pass
asked = json.load(sys.stdin)

class Bytes:
    is_tokenizer_wrapper, eos_token_id, bos_token_id, special_token_ids = True, 256, None, []
    tokens = [bytes([value]) for value in range(256)] + [b""]

    def __call__(self, text):
        return list(text.encode())

def check():
    tokenizer = llguidance.LLTokenizer(Bytes(), eos_token=256, slices=[])
    limits = llguidance.LLParserLimits(**asked["limits"])
    matcher = llguidance.LLMatcher(tokenizer, asked["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    print(json.dumps(matcher.get_error()))

threading.stack_size({STACK_BYTES})
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""


@lru_cache(maxsize=128)
def complaint(grammar: str) -> str:
    """Why `grammar`, in llguidance's own form, does not compile; "" where it does. Raises GrammarRefused.

    Takes a tenth of a second, and at most about one of a processor.
    """
    asked = json.dumps({"grammar": grammar, "limits": LIMITS}).encode()
    try:
        done = subprocess.run([sys.executable, "-c", _CHILD], input=asked, capture_output=True, timeout=_WALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GrammarRefused("The grammar could not be checked in time.", hint="Try again later.") from error
    try:
        return str(json.loads(done.stdout))
    except ValueError:
        return f"it takes more than {_SECONDS} s, or more memory than it may"
