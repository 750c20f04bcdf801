"""A grammar is the server's own, and holds whatever the server does. What a server cannot follow is refused."""

import itertools
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft import DecodingParams, Generation, decoding_params, make_plan
from skydraft.choosing.grammar import GrammarAlong, compile_grammar
from skydraft.errors import CloudError, LeftGrammar, OptionError
from skydraft.grammars import json_schema, lark, regex
from tests.hostile.texts import DRAFT, TARGET, TEXT, committed

from ..grammars import PERSON
from . import faults
from .fakes import GENERATING, IDS, fake

CALL = 'start: "<call>" args "</call>"\nargs: %json {"type": "object", "properties": {"a": {"enum": [1, 22]}}}'
PATTERNS = [regex("(语速|的|，|[a-z]){9,12}。"), regex("今天天气(很好|不好)，请慢慢说。")]
GRAMMARS = [json_schema(PERSON), "json_object:", *PATTERNS, lark(CALL)]
KINDS = {"vllm": GRAMMARS, "sglang": GRAMMARS[:4], "llama-server": GRAMMARS[:2]}
ROWS = [(dialect, grammar) for dialect, grammars in KINDS.items() for grammar in grammars]


def follows(done: Generation, grammar: str) -> None:
    """Fails unless each token is one that the grammar allows."""
    along = GrammarAlong(compile_grammar(grammar, TARGET.vocab), TARGET.vocab, 0)
    for at, token_id in enumerate(written := committed(done)):
        assert along.allowed(np.array(written[:at], np.int32))[token_id]


def begun(cloud: Any, mode: str, params: DecodingParams, *, raw: bool = True) -> Generation:
    return skydraft.generate(TEXT, edge=DRAFT, cloud=cloud, plan=make_plan(mode), params=params, raw=raw)


@pytest.mark.parametrize(("dialect", "grammar"), ROWS)
def test_a_grammar_is_the_servers_own_and_takes_one_request(dialect: str, grammar: str) -> None:
    params = DecodingParams(max_new_tokens=32, grammar=grammar)
    near = begun(TARGET, "cloud", params).run()
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        for mode in ("cloud", "lossless"):
            done = begun(cloud, mode, params).run()
            assert (done.token_ids, done.finish_reason) == (near.token_ids, near.finish_reason)
            assert done.receipt.calls == 1 and set(done.origins) == {"cloud"}


FAULTS = {"500": faults.refuses(500), "cut": faults.cut(2), "hangs up": faults.hangs_up()}


@pytest.mark.parametrize(("dialect", "grammar"), ROWS)
@pytest.mark.parametrize("fault", [*FAULTS, "a server that knows no grammar"])
def test_a_text_fits_its_grammar(dialect: str, grammar: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a break the server goes on without it. Where it leaves the grammar, the draft model writes, or nobody."""
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url, timeout_s=20)) as cloud:
        number = itertools.count()
        if fault in FAULTS:
            server.fault_of = lambda path: FAULTS[fault] if path in GENERATING and next(number) % 3 == 1 else None
        else:
            monkeypatch.setattr("tests.stock.answering.GrammarAlong", lambda *given: None)
        params = DecodingParams(max_new_tokens=32, grammar=grammar)
        done = begun(cloud, "lossless", params).run()
        follows(done, grammar)
        assert fault in FAULTS or "edge-fallback" in done.origins
        generation = begun(cloud, "cloud", params)
        try:
            generation.run()
        except CloudError as error:
            assert isinstance(error, LeftGrammar) and "\n" not in error.line
        else:
            assert fault in FAULTS
        follows(generation, grammar)


ZH, PLAIN, NGRAM = decoding_params("zh-short"), DecodingParams(), DecodingParams(no_repeat_ngram_size=3)
SCHEMA, PATTERN, LARK = (DecodingParams(grammar=each) for each in GRAMMARS[::2])
PRESENCE, REPEATED = DecodingParams(presence_penalty=0.5), DecodingParams(repetition_penalty=1.2)
LEAST, THINKING = DecodingParams(min_new_tokens=4), DecodingParams(min_new_tokens=4, think_end="</think>")
UNCHECKED = "needs skydraft serve, vLLM, SGLang or llama-server"
REFUSED: list[tuple[tuple[str, ...], DecodingParams, Any, str]] = [
    (IDS, ZH, "lossless", "comma_gap does not apply at a server without skydraft"),
    (IDS, NGRAM, "fluency", "no_repeat_ngram_size does not apply at"),
    (("sglang", "llama-server"), LARK, "lossless", "grammar of the kind lark, .* does not apply at"),
    (("llama-server",), PATTERN, "cloud", "It takes json_schema, json_object; skydraft serve takes all"),
    (("llama-server",), LEAST, "cloud", "min_new_tokens does not apply"),
    (("sglang",), REPEATED, "cloud", "repetition_penalty does not apply"),
    (("vllm", "sglang"), THINKING, "cloud", "would count thoughts at"),
    (IDS, SCHEMA, "fluency", "grammar needs a mode that streams"),
    (IDS, PRESENCE, "answers", "presence_penalty needs a mode that streams"),
    *((("chat",), PLAIN, mode, UNCHECKED) for mode in ("auto", "answers", "quality")),
]


@pytest.mark.parametrize(("api", "row"), [(api, row) for row in REFUSED for api in row[0]])
def test_what_a_server_cannot_follow_is_one_line(api: str, row: Any) -> None:
    """A chat checks no draft."""
    _, params, mode, says = row
    with fake("openai" if api == "chat" else api, TARGET) as server:
        for known in ("auto", api):  # before it is known what it runs, and at once
            cloud = skydraft.connect(server.url, api=known, model="toy")
            with closing(cloud), pytest.raises(OptionError, match=says) as told:
                begun(cloud, mode, params, raw=api != "chat").run()
            assert "\n" not in told.value.line
        assert not server.model.num_written
