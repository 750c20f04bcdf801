"""Training on tiny checkpoints: it learns, it can be stopped, and it says so where it has learned nothing."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.engines.adapter import Adapter, AdapterCard, read_adapter
from skydraft.engines.trainable import _without_bar, load_trainable
from skydraft.errors import OptionError
from skydraft.learning import dataset, training
from skydraft.learning.dataset import TrainingData, TrainingTask, Usable, choose, split
from skydraft.learning.halves import Halves
from skydraft.learning.lessons import Store
from skydraft.learning.training import Trained, Training, TrainSettings

from ..later import later

later("peft")

SETTINGS = TrainSettings(rank=8, num_layers=1, epochs=4, rate=2e-2)


def card(pair: tuple[Any, Any]) -> AdapterCard:
    return AdapterCard(
        base=pair[0].fingerprint, base_name="draft", vocab=pair[0].vocab.fingerprint, target=pair[1].fingerprint,
    )  # fmt: skip


def data_of(folder: Path) -> TrainingData:
    trained, held_out = split(choose(Store(folder), Usable()).lessons)
    return TrainingData(trained[:60], held_out, trained[60:70])


def train(
    pair: tuple[Any, Any], folder: Path, state: Path, settings: TrainSettings = SETTINGS, stop_at: int = -1
) -> Trained:
    steps = 0

    def progress(what: str, done: int, total: int, note: str) -> None:
        nonlocal steps
        steps += what.startswith("training")
        if steps == stop_at:
            raise KeyboardInterrupt

    trainable = load_trainable(pair[0].path)
    task = TrainingTask(pair[0].path, card(pair), data_of(folder), pair[0].vocab.size)
    return Training(trainable, task, settings, state, progress).run()


@pytest.fixture(scope="session")
def trained(pair: tuple[Any, Any], taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(pair, taught, tmp_path_factory.mktemp("state") / "state")


def test_it_says_more_often_what_the_target_says(trained: Trained) -> None:
    assert trained.held_out.low > 0, str(trained.held_out)
    assert trained.held_out.difference > 0.05, str(trained.held_out)
    assert trained.is_whole and not trained.objection


def test_it_learns_from_what_the_target_wrote_on(pair: tuple[Any, Any], written_on: Path, tmp_path: Path) -> None:
    found = train(pair, written_on, tmp_path / "state")
    held_out = data_of(written_on).held_out
    assert found.held_out.num_tokens == sum(len(each.marks) - each.marks.count("-") for each in held_out)
    assert found.held_out.difference > 0.03, str(found.held_out)


def same(one: Adapter, other: Adapter) -> bool:
    return one.pairs.keys() == other.pairs.keys() and all(
        np.array_equal(mine, theirs)
        for name in one.pairs
        for mine, theirs in zip(one.pairs[name], other.pairs[name], strict=True)
    )


@pytest.mark.parametrize("stop_at", [1, 6, 13])
def test_stopped_and_gone_on_with_gives_the_same_adapter(
    pair: tuple[Any, Any], taught: Path, trained: Trained, tmp_path: Path, stop_at: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(pair, taught, tmp_path / "state", stop_at=stop_at)
    again = train(pair, taught, tmp_path / "state")
    assert same(again.adapter, trained.adapter)
    assert again.held_out == trained.held_out


def test_another_seed_gives_another_adapter_and_a_state_of_others_is_not_gone_on_with(
    pair: tuple[Any, Any], taught: Path, trained: Trained, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        train(pair, taught, state, stop_at=6)
    other = TrainSettings(rank=8, num_layers=1, epochs=1, rate=2e-2, seed=1)
    fresh = train(pair, taught, tmp_path / "fresh", other)
    assert same(train(pair, taught, state, other).adapter, fresh.adapter)
    assert not same(fresh.adapter, trained.adapter)


def test_a_damaged_state_is_begun_anew(pair: tuple[Any, Any], taught: Path, trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"PK\x03\x04 not a state")
    assert same(train(pair, taught, tmp_path / "state").adapter, trained.adapter)


def test_time_that_is_over_ends_it_with_what_there_is_and_it_goes_on_from_there(
    pair: tuple[Any, Any], taught: Path, trained: Trained, tmp_path: Path
) -> None:
    steps = 0

    def progress(what: str, done: int, total: int, note: str) -> None:
        nonlocal steps
        steps += what.startswith("training")
        if steps == 3:
            run._deadline = 0.0

    task = TrainingTask(pair[0].path, card(pair), data_of(taught), pair[0].vocab.size)
    run = Training(load_trainable(pair[0].path), task, SETTINGS, tmp_path / "state", progress)
    assert not run.run().is_whole and steps == 3
    assert same(train(pair, taught, tmp_path / "state").adapter, trained.adapter)


def test_a_model_is_not_loaded_when_time_is_over(pair: tuple[Any, Any], taught: Path, tmp_path: Path) -> None:
    task = TrainingTask(pair[0].path, card(pair), data_of(taught), pair[0].vocab.size)
    told: list[str] = []
    with pytest.raises(TimeoutError, match="stopped before training; give more --minutes"):
        training.train(
            task, SETTINGS, ("cpu", 1), tmp_path / "state", lambda what, *_: told.append(what), time.monotonic() - 1
        )
    assert not told


def test_answers_are_read_until_the_deadline(taught: Path) -> None:
    with pytest.raises(TimeoutError, match="reading the answers; give more --minutes"):
        choose(Store(taught), Usable(), time.monotonic() - 1)


class Clock:
    """Time passes when something is begun: so many seconds for each kind of work."""

    def __init__(self, **seconds: float) -> None:
        self.now_s, self._seconds, self.told = 0.0, seconds, list[str]()

    def monotonic(self) -> float:
        return self.now_s

    def progress(self, what: str, done: int, total: int, note: str) -> None:
        self.told.append(what)
        first = what.partition(",")[0].partition(" ")[0]
        self.now_s += self._seconds.get(first, 0.0)


def timed(pair: tuple[Any, Any], folder: Path, state: Path, clock: Clock, seconds: float) -> Trained:
    task = TrainingTask(pair[0].path, card(pair), data_of(folder), pair[0].vocab.size)
    return Training(load_trainable(pair[0].path), task, SETTINGS, state, clock.progress, seconds).run()


MEASURING = {"held": 1.0, "guard": 1.0, "measuring": 1.0}  # "measuring" is what is held out


@pytest.mark.parametrize(
    ("seconds", "work"),
    [(5, "reading what to learn"), (100, "looking for rivals"), (170, "held out, before"), (210, "guard, before")],
)
def test_each_work_before_training_ends_when_what_follows_has_no_time(
    pair: tuple[Any, Any], taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, work: str
) -> None:
    clock = Clock(**MEASURING, reading=1.0, looking=1.0)
    monkeypatch.setattr(training, "time", clock)
    with pytest.raises(TimeoutError, match=work):
        timed(pair, taught, tmp_path / "state", clock, seconds)
    assert clock.now_s <= seconds + 1 and clock.told[-1] == work


@pytest.mark.parametrize("seconds", [150, 190, 230])
def test_the_deadline_bounds_the_last_step_and_measuring_at_the_end(
    pair: tuple[Any, Any],
    taught: Path,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    clock = Clock(**MEASURING, training=9.0)
    monkeypatch.setattr(training, "time", clock)
    assert not timed(pair, taught, tmp_path / "state", clock, seconds).is_whole
    assert "training" in " ".join(clock.told) and clock.now_s <= seconds
    assert same(train(pair, taught, tmp_path / "state").adapter, trained.adapter)


def test_the_halves_together_are_the_model(pair: tuple[Any, Any], taught: Path) -> None:
    import torch

    trainable = load_trainable(pair[0].path)
    lesson = data_of(taught).trained[0]
    whole = trainable.model(torch.tensor([[*lesson.prompt_ids, *lesson.token_ids]])).logits[0]
    for num_upper in (1, 2):
        halves = Halves(trainable, num_upper, pair[0].vocab.size)
        activations = halves.activations(lesson)
        rows = trainable.head(halves.rows(activations))
        expected = whole[[len(lesson.prompt_ids) - 1 + index for index in lesson.known]]
        assert torch.allclose(rows, expected, atol=1e-5)
        right = (expected.argmax(1).tolist(), [lesson.token_ids[index] for index in lesson.known])
        assert halves.num_right(activations) == (sum(map(int.__eq__, *right)), len(lesson.known))


def test_what_the_draft_model_is_found_to_say_is_what_was_collected(pair: tuple[Any, Any], taught: Path) -> None:
    halves = Halves(load_trainable(pair[0].path), 1, pair[0].vocab.size)
    for lesson in data_of(taught).held_out:
        choices = halves.choices(halves.activations(lesson))[:, 0].tolist()
        for index, choice in zip(lesson.known, choices, strict=True):
            if lesson.marks[index] != "t":
                assert (choice == lesson.token_ids[index]) == (lesson.marks[index] == "a")


def test_an_adapter_is_read_as_it_was_written(trained: Trained, tmp_path: Path) -> None:
    trained.write(tmp_path / "adapter")
    again = read_adapter(tmp_path / "adapter")
    assert same(again, trained.adapter) and again.card == trained.adapter.card
    assert again.fingerprint == trained.adapter.fingerprint
    assert (tmp_path / "adapter").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": 0},
        {"epochs": 0},
        {"minutes": -1},
        {"minutes": float("nan")},
        {"num_layers": 0},
        {"rate": 0},
        {"batch": 0},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        TrainSettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_answers", "given", "num_layers"), [(149, None, 4), (150, None, 12), (150, 3, 3)])
def test_many_answers_are_learned_in_more_layers_unless_the_user_says_how_many(
    num_answers: int, given: int | None, num_layers: int
) -> None:
    assert TrainSettings(num_layers=given).layers_for(num_answers) == num_layers


def test_a_lesson_passes_seven_modules_of_this_room_on_its_way_to_an_adapter() -> None:
    room = Path(dataset.__file__).parent
    entered: set[str] = set()
    waiting = ["collect", "training"]  # what begins the way, and what ends it
    while waiting:
        if (name := waiting.pop()) not in entered:
            entered.add(name)
            waiting += re.findall(r"skydraft\.learning\.(\w+)", (room / f"{name}.py").read_text(encoding="utf-8"))
    assert entered == {"collect", "lessons", "dataset", "halves", "training"}


def test_transformers_draws_no_bar_of_its_own_below_ours(capsys: pytest.CaptureFixture[str]) -> None:
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    with _without_bar():
        assert list(reader.tqdm([1, 2], desc="dequantising")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert list(reader.tqdm([1, 2], desc="dequantising")) == [1, 2]
    assert "dequantising" in capsys.readouterr().err
