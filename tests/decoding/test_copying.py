"""Drafts without a model: they are what followed before, they change no token, and nothing is committed unchecked."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, make_plan
from skydraft.decoding.generation import Generation
from skydraft.decoding.race.copying import MAX_COPIED, MIN_MATCH, Copies
from skydraft.decoding.race.cost_model import CostModel
from skydraft.engines.base import Engine
from skydraft.engines.toy import VocabularyOnly, character_vocab
from skydraft.errors import CloudLost, OptionError

from ..choosing.test_stopping import follower
from ..serving import Serving, serving, waiting
from ..toys import law

VOCAB = character_vocab("今天气很好我们去公园走，。员在的一是")
LONG = "今天气很好我们去公园走，。员在的一是"  # round and round
texts = st.lists(st.integers(0, 2), max_size=60)


def follows(text: list[int], prediction: list[int], prompt_len: int) -> list[list[int]]:
    """All that followed the last tokens, by looking everywhere."""
    last = text[-MIN_MATCH:]
    places = [text[at:] for at in range(MIN_MATCH, len(text)) if text[at - MIN_MATCH : at] == last]
    whole = [*text[:prompt_len][-MIN_MATCH:], *prediction]
    return places + [whole[at:] for at in range(MIN_MATCH, len(whole)) if whole[at - MIN_MATCH : at] == last]


@law(200)
@given(texts, texts, texts)
def test_a_draft_is_what_followed_the_last_tokens_somewhere(prompt: Any, prediction: Any, written: Any) -> None:
    copies, text = Copies(prompt, prediction), list(prompt)
    for token_id in (None, *written):
        text += [] if token_id is None else [token_id]
        draft = list(copies.draft(np.array(text, np.int32)))
        found = follows(text, prediction, len(prompt))
        assert bool(draft) == bool(found) and len(draft) <= MAX_COPIED
        assert not draft or any(each[: len(draft)] == draft for each in found)


def test_an_answer_may_begin_as_predicted_and_costs_decide_how_far() -> None:
    prompt, prediction = np.arange(20, dtype=np.int32), list(range(100, 140))
    assert Copies(prompt.tolist(), prediction).draft(prompt) == tuple(range(100, 116))
    for forward_ms, length in (((1.0, 9.0, 9.0, 9.0), 0), ((1.0, 2.0, 2.0, 1.2, 4.0, 5.0, 6.0, 7.0), 3)):
        costs = CostModel(0.5, forward_ms, 16)
        copies = Copies(prompt.tolist(), prediction, 7, costs)
        assert len(copies.draft(prompt)) == length
    for _ in range(40):
        copies.observe(0, 3)
    assert copies.draft(prompt) == ()  # they are never right
    rounds = (np.resize(prompt, 20 + num) for num in range(1, 600))
    assert any(copies.draft(text) for text in rounds)  # but may be again


EDGE, TARGET, NO_MODEL = follower("我们去", VOCAB), follower(LONG, VOCAB), VocabularyOnly(VOCAB)


def writing(edge: Engine, cloud: Any, prediction: str = LONG * 3, **options: Any) -> Generation:
    plan, params = options.pop("plan", make_plan("lossless")), DecodingParams(max_new_tokens=80, **options)
    return skydraft.generate("今天", edge=edge, cloud=cloud, plan=plan, params=params, prediction=prediction)


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving(waiting(follower(LONG, VOCAB), lambda: time.sleep(0.01))) as running:
        yield running


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}, {"no_repeat_ngram_size": 3}], ids=str)
@pytest.mark.parametrize("edge", [EDGE, NO_MODEL], ids=["a model", "none"])
@pytest.mark.parametrize("is_remote", [False, True])
def test_copies_change_no_token(server: Serving, options: dict[str, Any], edge: Engine, is_remote: bool) -> None:
    """With a draft model, and on a device without one."""
    plain = writing(EDGE, TARGET, plan=make_plan("cloud"), **options).run()
    done = writing(edge, skydraft.connect(server.address) if is_remote else TARGET, **options).run()
    assert done.token_ids == plain.token_ids and done.stats.num_copied_tokens > 0 and done.stats.exact
    if not options:
        assert done.stats.num_right_copies > 40 and len(done.records) < 30


def test_a_prediction_is_text_and_read_no_further_than_a_context_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    read, encode, eos = list[int](), VOCAB._encode, VOCAB.size - 1

    def encode_special(text: str) -> list[int]:
        read.append(len(text))
        return [token_id for part in text.split("<eos>") for token_id in (eos, *encode(part))][1:]

    monkeypatch.setattr(VOCAB, "_encode", encode_special)
    said = f"{LONG}<eos>{'我' * 40_000}"
    rounds = [done for done, _ in writing(EDGE, TARGET, said).rounds() if done.record.num_copied]
    assert rounds and not any(eos in done.block.token_ids for done in rounds)
    assert max(read) < 9 * EDGE.context_len < len(said)


def test_a_gate_is_never_asked_of_a_copy_and_a_lost_server_leaves_none_unchecked(server: Serving) -> None:
    assert writing(EDGE, TARGET, plan=make_plan("quality")).run().stats.num_copied_tokens == 0
    generation = writing(EDGE, skydraft.connect(server.address, timeout_s=0.3))
    next(done for done, _ in generation.rounds() if done.record.num_copied)
    server.stop()
    alone = [record for record in generation.run().records if record.outcome == "fallback"]
    assert alone and not any(record.num_copied for record in alone)


def test_a_device_without_a_model_writes_in_lossless_alone_and_waits_for_a_lost_server(server: Serving) -> None:
    cloud = skydraft.connect(server.address, timeout_s=3)
    for side in (TARGET, cloud):
        for plan in (make_plan("quality"), make_plan("edge"), make_plan("lossless", k=3)):
            with pytest.raises(OptionError, match="only mode lossless works"):
                writing(NO_MODEL, side, plan=plan)
    with pytest.raises(OptionError, match="gives no vocabulary"):  # a toy is no GGUF file
        skydraft.without_model(cloud)
    rounds = writing(NO_MODEL, cloud).rounds()
    next(rounds)
    server.stop()
    with pytest.raises(CloudLost):
        list(rounds)
