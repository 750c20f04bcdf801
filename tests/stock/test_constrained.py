"""What changes the target's choices is done by the server itself, and the text is that of the target here. A grammar
holds whatever the server does."""

import itertools
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, decoding_params, make_plan
from skydraft.choosing.grammar import GrammarAlong, compile_grammar
from skydraft.errors import CloudError, LeftGrammar, OptionError
from skydraft.grammars import json_schema, lark, regex
from tests.hostile.texts import DRAFT, TARGET, TEXT, committed

from .. import toys
from ..grammars import PERSON
from ..toys import law
from . import faults
from .conftest import SEED
from .fakes import GENERATING, IDS, fake
from .test_laws import decode, plans

ids = st.integers(0, len(toys.PIECES) - 1)
SHARED = {
    "logit_bias": st.dictionaries(ids, st.floats(-50, 50), max_size=3).map(lambda found: tuple(sorted(found.items()))),
    "repetition_penalty": st.floats(0.5, 2), "min_new_tokens": st.integers(1, 20),
}  # fmt: skip
COUNTED = {"frequency_penalty": st.floats(-2, 2), "presence_penalty": st.floats(-2, 2)}
NOT_THERE = {"vllm": (), "sglang": ("repetition_penalty",), "llama-server": ("min_new_tokens", *COUNTED)}


@law(100)
@given(st.sampled_from(IDS), st.sampled_from(toys.DRAFTERS), st.none() | plans, st.data())
def test_what_a_server_follows_is_local(
    clouds: dict[str, Any], dialect: str, drafter: tuple[float, int], plan: Any, data: st.DataObject
) -> None:
    """Penalties that count what was written are for streams, since each request would count anew."""
    named = {
        name: each for name, each in (SHARED if plan else SHARED | COUNTED).items() if name not in NOT_THERE[dialect]
    }
    chosen = {name: data.draw(each) for name, each in named.items() if data.draw(st.booleans())}
    params, plan = DecodingParams(max_new_tokens=24, **chosen), plan or make_plan("cloud")
    edge = toys.toy(SEED, drafter[0], sign=drafter[1])
    far, near = (decode(plan, params, edge, target) for target in (clouds[dialect], toys.toy(SEED)))
    assert far.token_ids == near.token_ids
    assert (far.origins, far.finish_reason, far.text) == (near.origins, near.finish_reason, near.text)


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


def streamed(cloud: Any, mode: str, grammar: str) -> Generation:
    plan, params = make_plan(mode), DecodingParams(max_new_tokens=32, grammar=grammar)
    return skydraft.generate(TEXT, edge=DRAFT, cloud=cloud, plan=plan, params=params, raw=True).run()


@pytest.mark.parametrize(("dialect", "grammar"), ROWS)
def test_a_grammar_is_the_servers_own_and_takes_one_request(dialect: str, grammar: str) -> None:
    params = DecodingParams(max_new_tokens=32, grammar=grammar)
    near = skydraft.generate(TEXT, cloud=TARGET, plan=make_plan("cloud"), params=params, raw=True).run()
    with fake(dialect, TARGET) as server, closing(skydraft.connect(server.url)) as cloud:
        for mode in ("cloud", "lossless"):
            done = streamed(cloud, mode, grammar)
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
            monkeypatch.setattr("tests.stock.model.GrammarAlong", lambda *given: None)
        done = streamed(cloud, "lossless", grammar)
        follows(done, grammar)
        assert fault in FAULTS or "edge-fallback" in done.origins
        plan, params = make_plan("cloud"), done.request.params
        generation = skydraft.generate(TEXT, edge=DRAFT, cloud=cloud, plan=plan, params=params, raw=True)
        try:
            generation.run()
        except CloudError as error:
            assert isinstance(error, LeftGrammar) and "\n" not in error.line
        else:
            assert fault in FAULTS
        follows(generation, grammar)


ZH, NGRAM = decoding_params("zh-short"), DecodingParams(no_repeat_ngram_size=3)
SCHEMA, PATTERN, LARK = (DecodingParams(grammar=each) for each in GRAMMARS[::2])
PRESENCE, REPEATED = DecodingParams(presence_penalty=0.5), DecodingParams(repetition_penalty=1.2)
THINKING = DecodingParams(min_new_tokens=4, think_end="</think>")
REFUSED: list[tuple[tuple[str, ...], DecodingParams, str, str]] = [
    (IDS, ZH, "lossless", "comma_gap does not apply at a server without skydraft"),
    (IDS, NGRAM, "fluency", "no_repeat_ngram_size does not apply at"),
    (("sglang", "llama-server"), LARK, "lossless", "grammar of the kind lark, .* does not apply at"),
    (("llama-server",), PATTERN, "cloud", "It takes json_schema, json_object; skydraft serve takes all"),
    (("llama-server",), DecodingParams(min_new_tokens=4), "cloud", "min_new_tokens does not apply"),
    (("sglang",), REPEATED, "cloud", "repetition_penalty does not apply"),
    (("vllm", "sglang"), THINKING, "cloud", "would count thoughts at"),
    (IDS, SCHEMA, "fluency", "grammar needs a mode that streams"),
    (IDS, PRESENCE, "answers", "presence_penalty needs a mode that streams"),
]


@pytest.mark.parametrize(("dialect", "row"), [(dialect, row) for row in REFUSED for dialect in row[0]])
def test_what_a_server_cannot_follow_is_one_line(dialect: str, row: Any) -> None:
    _, params, mode, says = row
    with fake(dialect, TARGET) as server:
        for api in ("auto", dialect):  # before it is known what it runs, and at once
            cloud = skydraft.connect(server.url, api=api)
            with closing(cloud), pytest.raises(OptionError, match=says) as told:
                skydraft.generate(TEXT, edge=DRAFT, cloud=cloud, plan=make_plan(mode), params=params, raw=True).run()
            assert "\n" not in told.value.line
        assert not server.model.num_written
