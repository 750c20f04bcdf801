"""Many devices on one server: what they write is what one writes, and what they get is measured."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudError, OptionError
from skydraft.evaluation.comparison import request_of
from skydraft.evaluation.devices import KeptRow, KeptRows, RecordedDraft, agreement_of, drive, measure_load, turned
from skydraft.evaluation.modes import Mode, parse_mode
from skydraft.evaluation.records import PromptEntry
from skydraft.gating.gates import measure

from ..serving import Serving, serving
from ..toys import law
from . import pairs

TEXTS = pairs.prompts(1)[:3]
PROMPTS = [PromptEntry(id=text, prompt=text) for text in TEXTS]
FORWARD_S = 0.02


def mode(text: str) -> Mode:
    return parse_mode(text, lambda _: DecodingParams(max_new_tokens=20))


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(open_toy("toy"), max_sessions=4) as running:
        yield running


def requests_in(name: str) -> list[GenerateRequest]:
    return [request_of(prompt, mode(name)) for prompt in PROMPTS]


def connecting(server: Serving, **options: Any) -> Any:
    return partial(skydraft.connect, server.address, require=True, **options)


@law(60)
@given(st.lists(st.floats(-30, 30, width=32), min_size=3, max_size=400), st.integers(3, 400))
def test_a_row_that_is_written_is_the_one_that_was_read(values: list[float], kept: int) -> None:
    """Its best tokens, so that a schema may forbid some, and its signals. Those that are not kept are equal."""
    row, again = np.array(values, np.float32), np.empty(len(values), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skydraft.evaluation.devices._NUM_KEPT", kept)
        KeptRow.of(row).write(again)
    found, signals, best = measure(again), measure(row), np.argsort(-row, kind="stable")[:kept]
    assert np.allclose(row[best] - row.max(), again[best] - again.max(), atol=1e-3)
    assert found.top_prob == pytest.approx(signals.top_prob, abs=1e-3)
    assert found.margin == pytest.approx(signals.margin, abs=1e-3)
    rest = 1 - np.exp(again[best].astype(float)).sum()
    assert -1e-3 <= found.entropy - signals.entropy <= max(rest, 0) * np.log(len(row)) + 1e-3


@pytest.mark.parametrize("name", ["edge", "lossless;k=4", "gate=entropy:1.5;k=4"])
def test_recorded_drafts_write_what_their_model_writes_and_compute_it_once(name: str) -> None:
    """Also where rejected drafts are rolled back, and where a gate looks at what was recorded."""
    real, target, plan, params = open_toy("toy:drift=0.3"), open_toy("toy"), mode(name).plan, mode(name).params
    texts, counts = list[Any](), list[int]()
    with closing(KeptRows(real)) as kept:
        for edge in (real, RecordedDraft(kept, 0.0), RecordedDraft(kept, 0.0)):
            done = skydraft.generate("语速", edge=edge, cloud=target, plan=plan, params=params).run()
            texts.append((done.token_ids, done.origins))
            counts.append(kept.num_computed)
    assert texts[0] == texts[1] == texts[2] and counts[0] == 0 < counts[1] == counts[2]


def test_recorded_drafts_follow_a_schema_as_their_model_does() -> None:
    """The best token alone was recorded: where a schema forbids it, the next one has to be known too."""
    real, target, texts, counts = open_toy("toy:drift=0.3"), open_toy("toy"), list[Any](), list[int]()
    params = DecodingParams(max_new_tokens=20, grammar="regex:[0-9]{2}(左|右)[a-f]{3}。")
    with closing(KeptRows(real)) as kept:
        for edge in (real, RecordedDraft(kept, 0.0), RecordedDraft(kept, 0.0)):
            done = skydraft.generate("语速", edge=edge, cloud=target, plan=mode("edge").plan, params=params).run()
            texts.append((done.text, done.token_ids))
            counts.append(kept.num_computed)
    assert texts[0] == texts[1] == texts[2] and texts[0][0][-1] == "。"
    assert counts[0] == 0 < counts[1] == counts[2]


def test_a_row_that_several_ask_for_at_once_is_computed_once() -> None:
    with closing(KeptRows(open_toy("toy"))) as kept, ThreadPoolExecutor(8) as pool:
        kept.real.floor.acquire()  # all of them come to wait for it
        asked_for = [pool.submit(kept.after, np.array([1, 2, 3], np.int32)) for _ in range(8)]
        threading.Event().wait(0.1)
        kept.real.floor.release()
        rows = {id(each.result()) for each in asked_for}
    assert len(rows) == kept.num_computed == 1


def test_all_clients_write_the_text_of_the_target(server: Serving) -> None:
    target, edge = open_toy("toy"), open_toy("toy:drift=0.3")
    with closing(KeptRows(edge)) as kept:
        make_edge = partial(RecordedDraft, kept, 0.0)
        asked_for = requests_in("lossless;k=4")
        clients = drive(connecting(server), make_edge, [asked_for, asked_for[1:], asked_for[:1]])
    assert [len(client.texts) for client in clients] == [3, 2, 1]
    for client in clients:
        assert client.num_tokens == sum(len(token_ids) for _, token_ids in client.texts)
        for request, token_ids in client.texts:
            alone = skydraft.start(replace(request, plan=skydraft.make_plan("cloud")), cloud=target)
            assert alone.run().token_ids == token_ids


def slow_toy() -> Any:
    engine: Any = open_toy("toy", max_sequences=8)
    forward = engine.forward

    def slowed(feeds: Any, **options: Any) -> Any:
        threading.Event().wait(FORWARD_S)
        return forward(feeds, **options)

    engine.forward = slowed
    return engine


def test_speeds_and_waits_are_those_of_the_server() -> None:
    with serving(slow_toy()) as server, closing(KeptRows(open_toy("toy:drift=0.3"))) as kept:
        found = [
            measure_load(connecting(server), kept, mode(name), PROMPTS, num, 1.0)
            for name, num in (("cloud", 1), ("cloud", 4), ("lossless;k=4", 1))
        ]
    alone, together, drafted = found
    assert [each.mode for each in found] == ["cloud", "cloud", "lossless;k=4"]
    assert 0 < alone.tokens_per_s <= 1 / FORWARD_S + 1
    assert together.tokens_per_s > alone.tokens_per_s  # rows of several share a forward
    assert drafted.wait_ms >= 1e3 * FORWARD_S and all(0 < each.wait_ms <= each.late_ms for each in found)
    assert all(each.num_computed == 0 < each.busy for each in found)


def test_the_agreement_is_that_of_the_audited_part_of_what_was_skipped() -> None:
    def record(outcome: str, committed: int, audited: int = 0, agreed: int = 0) -> Any:
        return SimpleNamespace(outcome=outcome, num_committed=committed, num_audited=audited, num_agreed=agreed)

    seen = [record("skipped", 10), record("verified", 6), record("written", 4)]
    assert agreement_of([*seen[:2], record("written", 4, 4, 3)]) == pytest.approx(1 - 10 * 0.25 / 20)
    assert agreement_of(seen) is None and agreement_of(seen[1:]) == 1 and agreement_of([]) is None


def test_a_mode_that_cannot_be_is_refused_and_a_server_that_is_lost_is_no_figure(server: Serving) -> None:
    kept = KeptRows(open_toy("toy:drift=0.3"))
    with pytest.raises(OptionError, match="no calibration"):
        measure_load(connecting(server), kept, mode("auto"), PROMPTS, 2, 0.2)
    with serving(open_toy("toy")) as lost:
        drive(connecting(lost), partial(RecordedDraft, kept, 0.0), [requests_in("cloud")])
        threading.Timer(0.5, lost.stop).start()
        with pytest.raises(CloudError):
            measure_load(connecting(lost, timeout_s=2.0), kept, mode("cloud"), PROMPTS, 2, 600.0)
    with pytest.raises(CloudError):
        asked_for = turned(requests_in("cloud"), 3)
        drive(connecting(lost, timeout_s=0.3), partial(RecordedDraft, kept, 0.0), asked_for, 9)
