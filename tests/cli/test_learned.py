"""The table of `learn run`: what its figures count, and which mode it names."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skydraft import api
from skydraft.cli.learn_run import _may_begin
from skydraft.cli.learned import figures, judge, show_table
from skydraft.config import DecodingParams
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import open_toy
from skydraft.evaluation.tasks.checks import Regex
from skydraft.prompts.messages import asked


@pytest.mark.parametrize(
    ("audited", "agreed", "agreement"),
    [(0, 0, 0.9), (99, 0, 0.9), (100, 80, 0.9), (200, 200, 1.0)],
    ids=["never seen", "few seen", "seen", "all as the target"],
)
def test_what_was_skipped_counts_as_what_the_target_saw_of_it(audited: int, agreed: int, agreement: float) -> None:
    numbers = Counter(
        tokens=1000, calls=20, written=100, skipped=500, audited=audited, agreed=agreed, checked=4, right=3
    )
    found = figures(numbers, alone=0.8)
    assert found == pytest.approx({"agreement": agreement, "right": 0.75, "calls a token": 0.02, "written": 0.1})


@pytest.mark.parametrize(
    ("alone", "says"),
    [
        (0.96, "--mode edge --audit-share 0.05 keeps an agreement of 0.95 here"),
        (0.90, "--mode quality keeps an agreement of 0.95 here"),
        (0.10, "Only lossless and cloud keep an agreement of 0.95"),
    ],
)
def test_the_mode_that_asks_least_is_named(capsys: pytest.CaptureFixture[str], alone: float, says: str) -> None:
    edge, quality = Counter(tokens=1, skipped=1), Counter(tokens=100, calls=4, written=20, skipped=50, ms=8000)
    after = {"edge": edge, "quality": quality, "answers": Counter(tokens=100, calls=9, written=40, skipped=30)}
    show_table({"edge": edge, "quality": quality}, after, (0.5, alone), Counter(tokens=100, calls=1, written=100))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        "edge",
        "0.500",
        "→",
        f"{alone:.3f}",
        "0.000",
        "→",
        "0.000",
        "0.000",
        "→",
        "0.000",
        "–",
        "→",
        "–",
    ]
    assert lines[0].split()[-1] == "tokens/s" and lines[2].split()[-3:] == ["12.5", "→", "12.5"]
    assert [line.split()[0] for line in lines[1:5]] == ["edge", "quality", "answers", "cloud"]
    assert lines[3].split()[1] == "–" and lines[-1].startswith(says)


def test_the_price_has_the_answers_that_judge(capsys: pytest.CaptureFixture[str]) -> None:
    ask = GenerateRequest(asked("一"), params=DecodingParams(max_new_tokens=10))
    answering: Any = SimpleNamespace(todo=[ask] * 36, num_prompt_tokens=0)
    guarding: Any = SimpleNamespace(todo=[], num_prompt_tokens=0)
    how: Any = SimpleNamespace(yes=True)
    cloud: Any = SimpleNamespace(given={"price": "0,0,1000000"})
    assert _may_begin(answering, guarding, how, cloud)
    assert "some 360 tokens, for about 7.2e+02" in capsys.readouterr().err


def test_texts_are_judged_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others the draft model reads along late, and the target writes more than in an app."""
    under_way: list[int] = []

    @contextmanager
    def watched(*given: Any, **named: Any) -> Iterator[Any]:
        under_way.append(1 + (under_way[-1] if under_way else 0))
        with start(*given, **named) as generation:
            yield generation
        under_way.append(under_way[-1] - 1)

    @contextmanager
    def counting(total: int) -> Iterator[Callable[..., None]]:
        yield lambda *_: None

    start = api.start
    monkeypatch.setattr(api, "start", watched)
    questions = [(GenerateRequest(asked(prompt)), None) for prompt in ("一", "二", "三")]
    pair: Any = open_toy("toy:drift=0.2"), open_toy("toy")
    judge(questions, ["none"], pair, tmp_path / "judged", counting)
    assert under_way == [1, 0] * 6  # in quality and in answers; without checks edge has nothing to tell


def test_what_was_judged_is_judged_again_only_for_another_prompt_check_or_adapter(tmp_path: Path) -> None:
    pair: Any = open_toy("toy:drift=0.2"), open_toy("toy")
    asks = [GenerateRequest(asked(prompt)) for prompt in ("一", "二")]
    counted: list[int] = []

    @contextmanager
    def counting(total: int) -> Iterator[Callable[..., None]]:
        done: list[object] = []
        yield lambda *_: done.append(_)
        assert len(done) == total
        counted.append(total)

    def right(pattern: str, number: int = 2) -> float:
        check = Regex(kind="regex", pattern=pattern)
        (found,) = judge([(each, check) for each in asks[:number]], ["none"], pair, tmp_path / "judged", counting)
        assert found.keys() == {"edge", "quality", "answers"}  # no calibration of toys
        return figures(found["edge"], 0.0)["right"]

    assert (right(".", 1), right("."), right("never"), right(".")) == (1, 1, 0, 1)
    (tmp_path / "judged").write_bytes(b"")
    assert right(".", 1) == 1 and counted == [3, 3, 6, 0, 3]
