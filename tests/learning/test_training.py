"""Training on tiny checkpoints: it learns, twice the same, and it says so where it has learned nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.engines.adapter import AdapterCard, read_adapter
from skydraft.engines.checkpoints.trainable import load_trainable
from skydraft.lab.learning import training
from skydraft.lab.learning.dataset import TrainingTask, choose, split
from skydraft.lab.learning.halves import Halves
from skydraft.lab.learning.lessons import Store
from skydraft.lab.learning.training import Trained, Training, TrainSettings, cross_fitted, gain, trained_before

from ..later import later

later("peft")

SETTINGS = TrainSettings(rank=8, num_layers=1, epochs=4, rate=2e-2)


def task_of(pair: tuple[Any, Any], folder: Path) -> TrainingTask:
    draft, target = pair
    trained, held_out = split(choose(Store(folder), draft.vocab)[0])
    card = AdapterCard(base=draft.fingerprint, base_name="d", vocab=draft.vocab.fingerprint, target=target.fingerprint)
    return TrainingTask(draft.path, card, draft.vocab.size, trained[:60], held_out)


@pytest.fixture(scope="module")
def task(pair: tuple[Any, Any], taught: Path) -> TrainingTask:
    return task_of(pair, taught)


def train(task: TrainingTask, settings: TrainSettings = SETTINGS) -> Trained:
    return Training(load_trainable(task.path), task, settings, lambda *_: None).run()


@pytest.fixture(scope="module")
def trained(task: TrainingTask) -> Trained:
    return train(task)


def test_it_says_more_often_what_the_target_says(trained: Trained, tmp_path: Path) -> None:
    assert trained.held_out.low > 0 and trained.held_out.after > trained.held_out.before + 0.05, str(trained.held_out)
    unsure = replace(trained, held_out=replace(trained.held_out, low=0.0))
    assert not trained.objection and unsure.objection == "on the held-out answers the gain is not certain"
    trained.write(tmp_path / "adapter")
    again = read_adapter(tmp_path / "adapter")
    assert again.fingerprint == trained.adapter.fingerprint and again.card == trained.adapter.card
    assert len(again.card.trained_on) == 60 and again.card.architecture == "qwen2"


def test_a_step_is_the_plain_log_likelihood_of_four_answers(task: TrainingTask) -> None:
    """Two steps, done a second time with the whole model: no label is smoothed, and no step has more answers."""
    import torch

    task = replace(task, trained=task.trained[:8])
    made = train(task, replace(SETTINGS, epochs=1)).adapter
    trainable = load_trainable(task.path)
    labels = [torch.tensor([lesson.token_ids[index] for index in lesson.known]) for lesson in task.trained]

    def logits(number: int) -> Any:  # [num_labels, vocab_size]
        lesson = task.trained[number]
        at = [len(lesson.prompt_ids) - 1 + index for index in lesson.known]
        ids = torch.tensor([[*lesson.prompt_ids, *lesson.token_ids]])
        return trainable.model(ids).logits[0, at, : task.vocab_size]

    rivals = [logits(number).topk(4).indices.flatten() for number in range(8)]
    vocab = torch.cat([*labels, *rivals]).unique()
    again = Training(trainable, task, SETTINGS, lambda *_: None)
    lora, order = again._inject(), again._order(8, epoch=0)
    optimizer = torch.optim.AdamW(lora.values())
    for step in range(2):
        optimizer.param_groups[0]["lr"] = SETTINGS.rate * (1 - step / 2)
        optimizer.zero_grad()
        likely = [
            torch.log_softmax(logits(number)[:, vocab], 1).gather(1, torch.searchsorted(vocab, labels[number])[:, None])
            for number in order[4 * step :][:4]
        ]
        (-torch.cat(likely).mean()).backward()
        torch.nn.utils.clip_grad_norm_(lora.values(), 1.0)
        optimizer.step()
    for name, value in lora.items():
        matrix, _, side = name.partition(".lora_")
        theirs = torch.from_numpy(made.pairs[matrix]["AB".index(side[0])])
        assert (theirs - value).norm() < 0.005 * value.norm(), name


def test_it_learns_from_what_the_target_wrote_on(pair: tuple[Any, Any], written_on: Path) -> None:
    task = task_of(pair, written_on)
    found = train(task)
    assert found.held_out.num_tokens == sum(len(each.marks) - each.marks.count("-") for each in task.held_out)
    assert found.held_out.after > found.held_out.before + 0.03, str(found.held_out)


def test_twice_gives_the_same_adapter_and_other_settings_another(task: TrainingTask, trained: Trained) -> None:
    again = train(task)
    assert again.adapter.fingerprint == trained.adapter.fingerprint and again.held_out == trained.held_out
    assert train(task, replace(SETTINGS, rate=1e-2)).adapter.fingerprint != trained.adapter.fingerprint


def test_what_was_trained_is_known_again_by_its_key_alone(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "trial.gguf"
    trained.write(path, "mine")
    again = trained_before(path, "mine")
    assert again and again.held_out == trained.held_out
    assert again.adapter.fingerprint == trained.adapter.fingerprint and trained_before(path, "other") is None
    for damaged in (path.with_suffix(".json"), path):
        damaged.write_bytes(damaged.read_bytes()[:-9])
        assert trained_before(path, "mine") is None


def test_what_chooses_the_best_epoch_does_not_measure_it() -> None:
    """Epochs that differ by chance: the best one seems to gain, and no more than chance does if it is cross-fitted."""
    rng, prompts = np.random.default_rng(0), list(range(20))
    found = {"best": 0.0, "fitted": 0.0}
    for _ in range(300):
        counts = [[(right, 100) for right in rng.binomial(100, 0.5, 20).tolist()] for _ in range(4)]
        found["best"] += max(map(training.alpha, counts)) - 0.5
        found["fitted"] += training.alpha(cross_fitted(counts, prompts)) - 0.5
    assert found["best"] / 300 > 0.008 and abs(found["fitted"] / 300) < 0.002
    twice = [[(1, 2)] * 4, [(2, 2)] * 4]
    assert cross_fitted(twice, ["a", "b", "a", "b"]) == twice[1]


def test_few_prompts_tell_nothing_however_many_answers_they_have() -> None:
    few, enough = (gain([(5, 10)] * 60, [(6, 10)] * 60, [index % num for index in range(60)]) for num in (5, 6))
    assert (few.low, few.high) == (-1, 1) and few.after - few.before == pytest.approx(0.1)
    assert enough.low == pytest.approx(0.1) == enough.high


def test_the_halves_together_are_the_model(task: TrainingTask) -> None:
    import torch

    trainable, lesson = load_trainable(task.path), task.trained[0]
    whole = trainable.model(torch.tensor([[*lesson.prompt_ids, *lesson.token_ids]])).logits[0]
    expected = whole[[len(lesson.prompt_ids) - 1 + index for index in lesson.known]]
    right = sum(map(int.__eq__, expected.argmax(1).tolist(), [lesson.token_ids[index] for index in lesson.known]))
    for num_upper in (1, 2):
        halves = Halves(trainable, num_upper, task.vocab_size)
        activations = halves.activations(lesson)
        assert torch.allclose(trainable.head(halves.rows(activations)), expected, atol=1e-5)
        assert halves.num_right(activations) == (right, len(lesson.known))
