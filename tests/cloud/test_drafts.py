"""Whatever drafts come while the target writes, and whenever: the text is the stream's, token for token."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.access.limits import RowBudget
from skydraft.decoding.race.branch import MAX_AHEAD
from skydraft.engines.row_costs import RowProfile
from skydraft.types import Draft
from tests import reference, toys
from tests.cloud.driver import ENDLESS, Desk, Edge, desk_of
from tests.toys import law

Row = list[Any]


def written_after(asked: Any) -> list[int]:
    """The text of a stream so far, its first token included."""
    return [asked.answers[0].token_id, *asked.written]


class Device:
    """Drafts what the target would write, or something else, at any time, as an honest device or as a liar."""

    def __init__(self, right: tuple[int, ...], seed: int, lies: float) -> None:
        self.right, self.random, self.lies = right, random.Random(seed), lies
        self.branch = 0

    def drafts(self, num_written: int) -> list[Draft]:
        rng, said = self.random, list[Draft]()
        for _ in range(rng.randrange(3)):
            base = max(num_written + rng.randint(-6, 2 if rng.random() < self.lies else 0), 0)
            self.branch += rng.randint(0, 2)
            ids = list(self.right[base : base + rng.randint(1, 12)]) or [1]
            if rng.random() < self.lies:
                ids[rng.randrange(len(ids))] = rng.randrange(len(toys.PIECES))
            cut = rng.randint(0, len(ids))
            said += [Draft(self.branch, base, tuple(ids[:cut])), Draft(0, 0, tuple(ids[cut:]))]
        rng.shuffle(said) if rng.random() < self.lies else None
        return [draft for draft in said if draft.token_ids]


@law(60)
@given(toys.seeds, toys.params(max_new_tokens=40), st.integers(0, 999), st.sampled_from([0.0, 0.3, 1.0]),
       st.sampled_from([1, 2, 5, 64]), st.integers(1, 3))  # fmt: skip
def test_any_schedule_of_drafts_leaves_each_text_as_it_is(seed, params, draw, lies, max_rows, num_texts) -> None:  # type: ignore[no-untyped-def]
    edges = [Edge(number, seed, replace(params, seed=number)) for number in range(1, num_texts + 1)]
    desk = desk_of(seed, max_rows=max_rows)
    alone = [reference.plain(toys.toy(seed), edge.prompt, edge.params) for edge in edges]
    asked = [desk.ask(edge.stream()) for edge in edges]
    devices = [Device(text, draw + index, lies) for index, (text, _) in enumerate(alone)]
    for _ in range(400):
        for each, device in zip(asked, devices, strict=True):
            if each.answers and not each.is_answered:
                each.drafts.extend(device.drafts(len(written_after(each))))
        desk.step()
    desk.check_answers()
    desk.check_batches()
    for each, (token_ids, finish) in zip(asked, alone, strict=True):
        assert tuple(written_after(each)) == token_ids and each.last.finish == finish


def racing(desk: Desk, edge: Edge, right: tuple[int, ...], **options: Any) -> Any:
    """A stream whose drafts are all there in time."""
    asked = desk.ask(edge.stream(), **options)
    desk.step(2)
    branch = 0
    while not asked.is_answered and len(written_after(asked)) < 30:
        branch, base = branch + 1, len(written_after(asked))
        asked.drafts.append(Draft(branch, base, right[base : base + MAX_AHEAD]))
        desk.step()
    return asked


def test_right_drafts_save_forwards_and_none_is_fed_twice() -> None:
    params = replace(ENDLESS, max_new_tokens=30, min_new_tokens=30)
    desk, edge, charged = desk_of(4, max_rows=4), Edge(0, 4, params), list[int]()
    budget = SimpleNamespace(
        charge=lambda owner, num_rows: charged.append(num_rows) or 0.0, has_spare=lambda owner: True
    )  # fmt: skip
    asked = racing(desk, edge, edge.likely(30), budget=budget)
    parts = asked.answers[1:]
    assert [part.num_accepted for part in parts] == [len(part.draft_ids) for part in parts] == [0] + [3] * 7
    assert desk.engine.num_rows == 30 == sum(charged) + 1  # one for each token; the first was paid for when asked
    assert (desk.docket.totals.num_drafts, desk.docket.totals.num_accepted) == (21, 21)


@pytest.mark.parametrize(("num_spent", "takes"), [(0, True), (40, False), (80, False)])
def test_a_text_takes_drafts_while_more_than_half_of_its_owner_s_rows_are_left(num_spent: int, takes: bool) -> None:
    """Else it would be slower than its stream: rows of drafts that are wrong count, too."""
    desk, edge = desk_of(4, max_rows=4), Edge(0, 4, replace(ENDLESS, max_new_tokens=300))
    budget = RowBudget(1.0, desk.clock)  # 64 at most
    budget.charge("ann", num_spent)
    asked = desk.ask(edge.stream(), budget=budget)
    for _ in range(20):
        if asked.answers:
            asked.drafts.append(Draft(len(asked.answers), len(written_after(asked)), edge.likely(9)))
        desk.clock.now += 1
        desk.step()
    assert any(part.draft_ids for part in asked.answers[2:]) == takes


def test_a_new_text_of_an_owner_takes_drafts_by_what_those_before_were_worth() -> None:
    desk, params = desk_of(4, max_rows=4), replace(ENDLESS, max_new_tokens=30, min_new_tokens=30)
    right = Edge(0, 4, params).likely(60)
    racing(desk, Edge(0, 4, params), tuple((each + 1) % len(toys.PIECES) for each in right))
    # A draft pays where at least every second one is right.
    desk.engine.profile = RowProfile(invariant_rows=64, forward_ms=(10.0, 15.0, 20.0, 25.0))
    asked = [desk.ask(Edge(number, 4, params).stream(), owner) for number, owner in ((1, "ann"), (2, "bob"))]
    desk.step(3)
    for each in asked:
        base = len(written_after(each))
        each.drafts.append(Draft(1, base, right[base : base + 9]))
    desk.step(4)
    ann, bob = (any(part.draft_ids for part in each.answers[1:]) for each in asked)
    assert bob and not ann
