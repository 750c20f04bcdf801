"""Measurements: each can be started, finds what it imports and says how it is called; and in `python -m bench clients`
what was recorded writes what its model writes, and costs nothing again.
"""

import importlib
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skydraft
from bench.__main__ import commands, main
from bench.clients import agreement_of, drive, requests_of
from bench.link import record, rounds_ms
from bench.recorded_draft import KeptRows, RecordedDraft
from bench.recorded_target import KeptChoices, RecordedModel, Recording
from skydraft.config import DecodingParams
from skydraft.engines.toy import open_toy
from skydraft.lab.evaluation.modes import parse_mode

from .serving import serving

NEEDS = {"bare_loop": "llama_cpp", "screenshots": "playwright"}
BENCH = Path(__file__).parent.parent / "bench"

TEXTS = ("语速", "语速慢", "你好")
PARAMS = DecodingParams(max_new_tokens=20)


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCH.glob("[a-z]*.py")))
def test_a_measurement_imports_and_explains_itself(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "skydraft"))
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__ and hasattr(module, "main") == (name in commands())
    assert name not in commands() or f"python -m bench {name}" in module.__doc__


def test_bench_lists_and_runs_its_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*commands()]
    with pytest.raises(SystemExit, match="There is no nothing"):
        main(["nothing"])
    monkeypatch.setattr("sys.argv", [])
    with pytest.raises(SystemExit) as ended:
        main(["reference", "--help"])
    assert not ended.value.code and capsys.readouterr().out.startswith("usage: python -m bench reference")


@pytest.mark.parametrize(("name", "grammar"), [
    ("edge", ""), ("lossless;k=4", ""), ("gate=entropy:1.5;k=4", ""), ("edge", "regex:[0-9]{2}(左|右)[a-f]{3}。"),
])  # fmt: skip
def test_recorded_drafts_write_what_their_model_writes_and_compute_it_once(name: str, grammar: str) -> None:
    """Also where rejected drafts are rolled back, a gate looks at what was recorded, or a schema forbids the best."""
    real, target, mode = open_toy("toy:drift=0.3"), open_toy("toy"), parse_mode(name, lambda _: PARAMS)
    params = DecodingParams(max_new_tokens=20, grammar=grammar)
    texts, counts = list[Any](), list[int]()
    with closing(KeptRows(real)) as kept:
        for edge in (real, RecordedDraft(kept, 0.0), RecordedDraft(kept, 0.0)):
            done = skydraft.generate("语速", edge=edge, cloud=target, plan=mode.plan, params=params).run()
            texts.append((done.token_ids, done.origins))
            counts.append(kept.num_computed)
    assert texts[0] == texts[1] == texts[2] and counts[0] == 0 < counts[1] == counts[2]


def test_all_clients_write_the_text_of_the_target() -> None:
    mode, target = parse_mode("lossless;k=4", lambda _: PARAMS), open_toy("toy")
    asked_for = requests_of(mode, TEXTS)
    with serving(open_toy("toy"), max_sessions=4) as server, closing(KeptRows(open_toy("toy:drift=0.3"))) as kept:
        connect = partial(skydraft.connect, server.address, require=True)
        done = drive(connect, partial(RecordedDraft, kept, 0.0), [asked_for, asked_for[1:], asked_for[:1]])
    alone = [skydraft.generate(t, cloud=target, plan=skydraft.make_plan("cloud"), params=PARAMS).run() for t in TEXTS]
    first, second, third = (each.token_ids for each in alone)
    assert [each.token_ids for each in done] == [first, second, third, second, third, first]


def test_a_recorded_pair_writes_its_text_in_the_rounds_of_the_pair_that_was_recorded() -> None:
    draft, target, plan = open_toy("toy:drift=0.3"), open_toy("toy"), skydraft.make_plan(k=4)
    text = record("zh", "语速", draft, target)
    text = replace(text, target_ids=text.target_ids[:20], draft_ids=text.draft_ids[:20])  # which repeats nothing yet
    recording, params = Recording([text]), DecodingParams(max_new_tokens=len(text.target_ids))
    model = RecordedModel(draft, recording, [0.0] * 8, 1)
    kept, wrong = KeptChoices(draft, recording), KeptChoices(draft, recording, is_wrong=True)
    rounds = []
    for edge, cloud in ((draft, target), (RecordedDraft(kept, 0.0), model), (RecordedDraft(wrong, 0.0), model)):
        done = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params).run()
        assert [*done.token_ids] == text.target_ids
        rounds.append([(each.num_draft, each.num_accepted) for each in done.records])
    assert rounds[0] == rounds[1] and not sum(accepted for _, accepted in rounds[2])
    assert rounds_ms(text, 4, 1.0, 0.0, [0.0] * 5) == sum(drafted for drafted, _ in rounds[0])


def test_the_agreement_is_that_of_the_audited_part_of_what_was_skipped() -> None:
    def record(outcome: str, committed: int, audited: int = 0, agreed: int = 0) -> Any:
        return SimpleNamespace(outcome=outcome, num_committed=committed, num_audited=audited, num_agreed=agreed)

    seen = [record("skipped", 10), record("verified", 6), record("written", 4)]
    assert agreement_of([*seen[:2], record("written", 4, 4, 3)]) == pytest.approx(1 - 10 * 0.25 / 20)
    assert agreement_of(seen) is None and agreement_of(seen[1:]) == 1 and agreement_of([]) is None
