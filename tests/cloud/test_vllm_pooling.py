"""The pooler's own logic, without vLLM: whatever the parts, its verdict is the one of any other target."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.cloud.vllm import pooling
from skydraft.cloud.vllm.asking import (
    ROWS_MISSING,
    UNKNOWN_CHOOSER,
    Asking,
    error_answer,
    params_text,
    read_answer,
    read_params,
    verdict_answer,
)
from skydraft.cloud.vllm.lookup import look_up
from skydraft.cloud.vllm.pooling import BlockPooler, Computed
from skydraft.config import DecodingParams, decoding_params
from skydraft.errors import EngineError, GrammarRefused, SkydraftError
from skydraft.types import DraftBlock, Verdict
from tests import toys
from tests.cloud.fake_vllm import rows_of

PROMPT = toys.PROMPT_IDS


def asked(chosen: DecodingParams, num_catch_up: int = 0, top: int = 0, **changed: Any) -> Asking:
    given: dict[str, Any] = {
        "chooser": "a", "params": params_text(chosen), "prompt_len": len(PROMPT), "seen_len": len(PROMPT),
        "num_catch_up": num_catch_up, "max_new_tokens": chosen.max_new_tokens, "top": top,
    }  # fmt: skip
    return Asking(**(given | changed))


def whole(engine: Any, asking: Asking | None, ids: tuple[int, ...], *, first: int = 0) -> Computed:
    sent = asking.sent() if asking else None
    hidden = rows_of(engine, ids)[first:]
    return Computed(sent, np.array(ids, np.int32), first, hidden, SimpleNamespace(), True)


def pooler(engine: Any) -> BlockPooler:
    return BlockPooler(engine.vocab, list)


@toys.law(75)
@given(toys.seeds, toys.params(), st.data())
def test_a_verdict_is_that_of_a_target_in_this_process(seed: int, params: DecodingParams, data: st.DataObject) -> None:
    target = toys.toy(seed)
    some = st.lists(st.integers(0, len(toys.PIECES) - 3), max_size=6)
    catch_up, draft = tuple(data.draw(some)), tuple(data.draw(some))
    top = data.draw(st.sampled_from([0, 0, 3]))
    block = DraftBlock(len(catch_up), draft)
    if block.base >= params.max_new_tokens:
        return
    expected = toys.verifier_of(target, params, top=top).verify(block, catch_up)
    ids = (*PROMPT, *catch_up, *draft[: params.max_new_tokens - block.base])
    rows, states, answer = rows_of(target, ids), SimpleNamespace(), None
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1), max_size=3)) if len(ids) > 1 else [])
    sent, own = asked(params, len(catch_up), top=top).sent(), pooler(target)
    parts = list(zip([0, *cuts], [*cuts, len(ids)], strict=True))
    # A request that was interrupted computes its rows again; it goes on behind what the prefix cache has.
    again = data.draw(st.integers(0, len(parts) - 1))
    for first, last in [*parts[: again + 1], *parts[again:]] if again < len(parts) - 1 else parts:
        hidden = rows[first:last].copy()
        part = Computed(sent, np.array(ids, np.int32), first, hidden, states, last == len(ids))
        (answer,) = own.pool([part])
        if last < len(ids):
            hidden[:] = np.nan  # the memory of a forward is the next one's
            assert answer is None
    assert answer is not None
    found = read_answer(answer, block, catch_up, target.vocab.size)
    assert found == expected


@pytest.mark.parametrize("most", [1, 2, 3, 256])
def test_a_call_may_hold_many_requests_and_few_rows_of_logits(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "_MAX_ROWS", most)
    target, params = toys.toy(3), decoding_params(max_new_tokens=20)
    widths = []

    def logits(pieces: Any) -> Any:
        widths.append(sum(map(len, pieces)))
        return [np.concatenate([piece, np.full((len(piece), 5), 99.0)], axis=1) for piece in pieces]  # padding

    own = BlockPooler(target.vocab, logits)
    drafts = [(1, 2, 3, 4), (), (7,), tuple(toys.ids("你", "在"))]
    parts = [whole(target, asked(params, chooser=f"{i}"), (*PROMPT, *draft)) for i, draft in enumerate(drafts)]
    answers = own.pool([*parts, whole(target, None, PROMPT)])
    for draft, answer in zip(drafts, answers, strict=False):
        expected = toys.verifier_of(target, params).verify(DraftBlock(0, draft), ())
        assert answer is not None and read_answer(answer, DraftBlock(0, draft), (), target.vocab.size) == expected
    assert max(widths) <= most and answers[-1] == b"{}"


def test_rows_that_the_prefix_cache_has_are_said_to_be_missing() -> None:
    target, params = toys.toy(1), decoding_params(max_new_tokens=20)
    ids = (*PROMPT, 1, 2, 3)
    for first in range(len(ids)):
        (answer,) = pooler(target).pool([whole(target, asked(params), ids, first=first)])
        assert (answer == ROWS_MISSING) == (first > len(PROMPT) - 1), first


def test_parameters_cross_once_and_are_asked_for_when_they_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "_MAX_CHOOSERS", 2)
    target, params = toys.toy(1), decoding_params(temperature=0.9, seed=4, max_new_tokens=20)
    own = pooler(target)

    def ask(name: str, text: str) -> bytes | None:
        return own.pool([whole(target, asked(params, chooser=name, params=text), PROMPT)])[0]

    known = ask("a", params_text(params))
    assert ask("a", "") == known != UNKNOWN_CHOOSER
    assert ask("b", "") == UNKNOWN_CHOOSER
    ask("b", params_text(params)), ask("a", ""), ask("c", params_text(params))
    assert ask("b", "") == UNKNOWN_CHOOSER and ask("a", "") == known


def nan_rows(target: Any, ids: tuple[int, ...]) -> Computed:
    part = whole(target, asked(decoding_params(max_new_tokens=20)), ids)
    part.hidden[:] = np.nan
    return part


def test_whatever_goes_wrong_is_an_answer_and_the_others_get_theirs() -> None:
    target, params = toys.toy(2), decoding_params(max_new_tokens=20)
    good = whole(target, asked(params), (*PROMPT, 1))
    wrong = [
        Computed({"what": 1}, good.token_ids, 0, good.hidden, SimpleNamespace(), True),
        Computed(asked(params, params="{").sent(), good.token_ids, 0, good.hidden, SimpleNamespace(), True),
        Computed(asked(params).sent() | {"top": -1}, good.token_ids, 0, good.hidden, SimpleNamespace(), True),
        nan_rows(target, (*PROMPT, 1)),
    ]
    wrong[1].asked["chooser"] = "b"  # type: ignore[index, call-overload]
    answers = pooler(target).pool([*wrong[:2], good, *wrong[2:]])
    for answer in (*answers[:2], *answers[3:]):
        assert answer is not None and json.loads(answer)["error"] == "failed"
        with pytest.raises(EngineError):
            read_answer(answer, DraftBlock(0, (1,)), (), target.vocab.size)
    assert answers[2] is not None and "num_accepted" in json.loads(answers[2])


def test_a_head_that_fails_fails_its_requests_and_no_call() -> None:
    def fails(hidden: Any) -> Any:
        raise RuntimeError("out of memory")

    target = toys.toy(2)
    own = BlockPooler(target.vocab, fails)
    reads = whole(target, None, PROMPT)
    answers = own.pool([whole(target, asked(decoding_params(max_new_tokens=9)), PROMPT), reads])
    assert answers[0] is not None and "out of memory" in answers[0].decode() and answers[1] == b"{}"


@toys.law(50)
@given(toys.params())
def test_parameters_survive_the_way(params: DecodingParams) -> None:
    assert read_params(params_text(params)) == params


@pytest.mark.parametrize(
    "given",
    [{}, {"chooser": 1}, asked(DecodingParams()).sent() | {"top": True}, asked(DecodingParams()).sent() | {"more": 1}],
)
def test_what_is_no_question_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Asking.read(given)
    with pytest.raises(ValueError):
        asked(DecodingParams(), prompt_len=9)


GOOD = Verdict(4, 1, 7, None, (True, False), (3,))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_accepted": 3}, {"num_accepted": "1"}, {"token_id": 999}, {"token_id": -1}, {"token_id": None},
        {"finish": "tired"}, {"audit": [True]}, {"audit_ranks": []}, {"audit": 1},
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_true_is_no_verdict(changed: dict[str, Any]) -> None:
    block, catch_up = DraftBlock(4, (5, 6)), (1, 2)
    assert read_answer(verdict_answer(GOOD), block, catch_up, 100) == GOOD
    with pytest.raises(EngineError):
        read_answer(json.dumps(json.loads(verdict_answer(GOOD)) | changed).encode(), block, catch_up, 100)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", ROWS_MISSING, UNKNOWN_CHOOSER])
def test_what_is_no_answer_is_an_engine_error(data: bytes) -> None:
    with pytest.raises(EngineError):
        read_answer(data, DraftBlock(0, ()), (), 100)


def test_a_grammar_that_is_refused_there_is_refused_here() -> None:
    refused = GrammarRefused("It takes too much.")
    with pytest.raises(GrammarRefused, match=r"^It takes too much\.$"):
        read_answer(error_answer(refused), DraftBlock(0, ()), (), 100)
    with pytest.raises(SkydraftError, match="ValueError: no"):
        read_answer(error_answer(ValueError("no")), DraftBlock(0, ()), (), 100)


@pytest.mark.parametrize(
    ("text", "guessed"),
    [
        ([], []),
        ([1, 2], []),
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3] * 2),
        ([5, 6, 1, 8, 6, 1], [8, 6, 1, 8, 6, 1, 8, 6]),
        ([7, 7, 7], [7] * 8),
        ([4, 5, 4], []),
    ],
)
def test_the_text_itself_says_what_may_come_next(text: list[int], guessed: list[int]) -> None:
    assert look_up(np.array(text, np.int32)) == tuple(guessed)


def test_the_latest_place_counts_and_a_guess_is_short() -> None:
    text = [1, 2, 3, 7, 7, 7, 1, 2, 3, *range(20, 40), 1, 2, 3]
    assert look_up(np.array(text, np.int32)) == tuple(range(20, 28))
