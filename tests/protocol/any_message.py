"""Strategies for whatever crosses the wire: any parameters, call, verdict or reply, and the bounds of their numbers."""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from skydraft.config import DecodingParams
from skydraft.protocol import codec
from skydraft.protocol.values import CloseCall, OpenCall, Opening, ServerInfo, TargetId, VerifyCall
from skydraft.types import Cost, Media, Prompt, Verdict
from tests.grammars import GRAMMARS

Call = OpenCall | VerifyCall | CloseCall
UINT32 = 2**32 - 1
MAX_ID = 2**31 - 1
numbers = st.integers(0, UINT32)
sessions = st.integers(1, UINT32)
few_ids = st.lists(st.integers(0, 200_000) | st.just(MAX_ID), max_size=12).map(tuple)
texts = st.text(max_size=12)
finishes = st.sampled_from([None, "eos", "stop_string", "sentences", "length"])
fingerprints = st.binary(max_size=8).map(bytes.hex)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


def _any_of(option: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    """Any number within the bounds that the option states."""
    low, high = option.metadata["option"].low, option.metadata["option"].high
    if isinstance(option.default, bool):
        return st.booleans()
    return st.integers(low, high) if isinstance(option.default, int) else between(low, high)


_options = dataclasses.fields(DecodingParams)
_numbers = {each.name: _any_of(each) for each in _options if isinstance(each.default, int | float)}
_numbers["temperature"] = st.just(0.0) | between(1e-6, 100)
_biases = st.dictionaries(st.integers(0, MAX_ID), between(-100, 100), max_size=3)
_without_grammar = st.builds(
    DecodingParams, logit_bias=_biases.map(lambda biases: tuple(sorted(biases.items()))),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=3).map(tuple), think_end=st.text(min_size=1, max_size=8),
    think_start=st.text(max_size=8), stop_token_ids=st.sets(st.integers(0, MAX_ID), max_size=3).map(sorted).map(tuple),
    **_numbers,
)  # fmt: skip
_grammars = st.sampled_from([*GRAMMARS, "json_object:", 'json_schema:{"const":"我们"}'])
any_params = _without_grammar | st.builds(
    lambda params, grammar: dataclasses.replace(params, sentences=0, grammar=grammar), _without_grammar, _grammars
)
# Features as they cross the wire: in half precision already.
media = st.builds(
    lambda shape, value: Media(np.full(shape, value, np.float16).astype(np.float32)),
    st.tuples(st.integers(1, 5), st.integers(3, 9)), st.floats(-60_000, 60_000, width=16),
)  # fmt: skip
targets = st.builds(TargetId, st.binary(min_size=4, max_size=4).map(bytes.hex), numbers)
openings = st.builds(
    Opening, fingerprint=fingerprints, prompt=st.builds(Prompt, few_ids, st.lists(media, max_size=3).map(tuple)),
    committed_ids=few_ids, params=st.just(DecodingParams()) | any_params, cache_scope=texts, target=st.none() | targets,
)  # fmt: skip
times = {name: between(0, 4e7) for name in ("forward_ms", "prefill_ms", "encode_ms", "queue_ms")}
sizes = numbers.filter(bool)
costs = (  # of a prompt, or of nothing: no rows
    st.builds(Cost, num_passes=st.just(0) | numbers, num_cached=st.just(0) | numbers, **times)
    | st.builds(Cost, num_passes=st.integers(1, 2**32), num_rows=sizes, **times)
)
infos = st.builds(
    ServerInfo, fingerprint=fingerprints, execution=st.sampled_from(["exact", "throughput"]),
    **dict.fromkeys(("version", "model", "weights"), texts),
    **dict.fromkeys(("vocab_size", "context_len", "max_sessions"), sizes), num_sessions=numbers,
)  # fmt: skip


@st.composite
def verify_calls(draw: st.DrawFn) -> VerifyCall:
    catch_up, opening = draw(few_ids), draw(st.none() | openings)
    before = len(opening.committed_ids) if opening else draw(st.integers(0, 3) | st.integers(0, UINT32 - len(catch_up)))
    session, epoch, digest, write = draw(sessions), draw(numbers), draw(numbers), draw(numbers)
    return VerifyCall(session, epoch, before + len(catch_up), catch_up, draw(few_ids), digest, opening, write)


calls: st.SearchStrategy[Call] = st.one_of(
    st.builds(OpenCall, session=sessions, epoch=numbers, opening=openings),
    verify_calls(),
    st.builds(CloseCall, sessions),
)


def encoded(call: Call) -> bytes:
    if isinstance(call, CloseCall):
        return codec.encode_close(call.session)
    return codec.encode_open(call) if isinstance(call, OpenCall) else codec.encode_verify(call)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    num_accepted, finish = draw(st.integers(0, 40) | numbers), draw(finishes)
    ids = st.integers(0, MAX_ID)
    token_id = draw(ids | st.none() if finish and num_accepted else ids)
    audit = draw(st.lists(st.booleans(), max_size=40).map(tuple))
    return Verdict(draw(numbers), num_accepted, token_id, finish, audit, draw(costs))


def as_sent(cost: Cost) -> Cost:
    """Times as they cross the wire: in units of 10 microseconds."""
    return dataclasses.replace(cost, **{name: round(getattr(cost, name) * 100) / 100 for name in times})
