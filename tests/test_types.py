"""Values that are valid by construction; and one vocabulary and one colour code for origins: JSON, terminal, report and
chat page say and show the same.
"""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.origins import LOOKS
from skydraft.types import Cost, DraftBlock, LinkCost, Media, Origin, Signals, StepRecord, Verdict

from .toys import law


def features(num_frames: int, fill: float = 0.5) -> np.ndarray:
    return np.full((128, num_frames), fill, np.float32)


PAGE = Path(__file__).parent.parent / "skydraft" / "gateway" / "page"


def test_media_is_its_content_and_cannot_be_changed_from_outside() -> None:
    given = features(9)
    one, same, other = Media(given), Media(features(9)), Media(features(9, 0.6))
    given[:] = 7
    assert one == same and hash(one) == hash(same) and one != other and one != Media(features(10)) and one != 9
    with pytest.raises(ValueError, match="read-only"):
        one.features[0, 0] = 1
    assert [Media(features(num)).num_tokens for num in (3, 4, 7, 10, 100, 3000)] == [1, 1, 2, 2, 25, 750]


def test_media_is_valid_or_not_there() -> None:
    for wrong in (features(9).astype(np.float64), features(9)[:0], features(2), features(9, np.nan)):
        with pytest.raises(ValueError):
            Media(wrong)


@law(50)
@given(st.sampled_from([Cost, LinkCost]), st.lists(st.lists(st.integers(0, 10**6), min_size=8, max_size=8)))
def test_costs_add_up_field_by_field(kind: type[Cost | LinkCost], rows: list[list[int]]) -> None:
    kinds = [type(field.default) for field in fields(kind)]
    spent = [kind(*(as_type(each) for as_type, each in zip(kinds, row, strict=False))) for row in rows]
    total = sum(spent, kind())  # type: ignore[call-overload]
    for field in fields(kind):
        added = getattr(total, field.name)
        assert added == sum(getattr(one, field.name) for one in spent) and type(added) is type(field.default)


@pytest.mark.parametrize(("target", "link", "overhead_ms"), [
    (Cost(1, 6, forward_ms=40.0), LinkCost(), 50.0),
    (Cost(1, 6, forward_ms=40.0, queue_ms=20.0), LinkCost(), 30.0),
    (Cost(1, 6, forward_ms=40.0, prefill_ms=30.0, encode_ms=10.0), LinkCost(), 50.0),  # parts of the forwards
    (Cost(1, 6, forward_ms=40.0, queue_ms=20.0), LinkCost(rtt_ms=65.0), 25.0),  # the wait holds what it was for
    (Cost(1, 6, forward_ms=400.0), LinkCost(rtt_ms=65.0), 25.0),  # computed ahead, while nobody waited
])  # fmt: skip
def test_overhead_is_what_no_model_no_queue_and_no_wire_took(target: Cost, link: LinkCost, overhead_ms: float) -> None:
    draft = Cost(5, 5, forward_ms=10.0, prefill_ms=4.0)
    record = StepRecord(1, 0, 5, 3, 4, "verified", "always", 100.0, 300.0, draft, target, link)
    assert record.overhead_ms == overhead_ms


def test_verdicts_and_blocks_are_valid_or_not_there() -> None:
    for wrong in ((-1, 0, 5, None), (3, -1, 5, None), (3, 0, None, "eos"), (3, 2, None, None)):
        with pytest.raises(ValueError):
            Verdict(*wrong)
    for base, signals in ((-1, ()), (0, (Signals(0.0, 1.0, 1.0),))):
        with pytest.raises(ValueError):
            DraftBlock(base, (1, 2), signals)


def test_every_origin_of_json_has_a_look_and_words_in_the_documentation() -> None:
    assert list(LOOKS) == list(get_args(Origin))
    told = (PAGE.parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"\| `([\w-]+)` \(\w+\) \| (.*) \|", told)) == {name: LOOKS[name].meaning for name in LOOKS}


def test_the_page_has_the_colours_lines_and_words_of_the_table() -> None:
    style = (PAGE / "theme.css").read_text(encoding="utf-8")
    english = json.loads((PAGE / "words/en.json").read_text(encoding="utf-8"))
    for origin, look in LOOKS.items():
        assert f"--{origin}: light-dark({look.light}, {look.dark});" in style
        (rule,) = re.findall(rf"\.coloured \.{origin}, \.key \.{origin} {{([^}}]*)}}", style)
        line = [f"text-decoration-{part}" for part in ("line", "style", "thickness")]
        given = dict(re.findall(r"([\w-]+): ([^;]+);", rule))
        parts = [given.get(name, plain) for name, plain in zip(line, ("underline", "", "1.5px"), strict=True)]
        assert given["color"] == f"var(--{origin})"
        assert (" ".join(parts) if parts[0] != "none" else "none") == look.line
        assert (english[f"origin.{origin}"], english[f"meaning.{origin}"]) == (origin, look.meaning)
