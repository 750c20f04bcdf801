"""The gate study by numbers that can be known beforehand; `tests/cli/test_report.py` counts a whole one again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from skydraft.evaluation.findings import Findings
from skydraft.evaluation.records import read_records
from skydraft.evaluation.summary import HAND_BACKS, study

from . import lines

AGREES, DIFFERS = (0.5, 0.75, 1.0), (3.0, 0.125, 0.25)  # entropy, margin, top probability


def findings(folder: Path, flags: list[bool], **changes: Any) -> Findings:
    """Prompt a in edge and cloud, with other tokens each, whose drafts the target refuses at these positions."""
    run = lines.run_line(prompts=lines.run_line().prompts[:1], **changes)
    size, made = len(flags), []
    for mode, first in (("edge", 1), ("cloud", 50)):
        ids = tuple(range(first, first + size))
        rounds = (lines.round_line(record=lines.record(num_committed=size)),)
        origins, pieces = (mode,) * size, ("我",) * size
        made.append(lines.generation(mode=mode, token_ids=ids, origins=origins, pieces=pieces, rounds=rounds))
        choices = tuple(token_id + flag for token_id, flag in zip(ids, flags, strict=True))
        made.append(
            lines.score(
                token_ids=ids, choices=choices, choice_pieces=pieces, nll=(0.5,) * size, drafted=ids,
                signals=tuple(DIFFERS if flag else AGREES for flag in flags),
            )
        )  # fmt: skip
    return Findings(read_records(lines.write(folder, run, *sorted(made, key=lambda line: line.kind))))


def test_signals_that_tell_all_cost_what_an_oracle_costs(tmp_path: Path) -> None:
    flags = [False, True, False, False, True, False, False, False]
    found = findings(tmp_path, flags)
    studied = study(found)
    assert studied is not None
    assert (studied.num_tokens, studied.alone, studied.alone_on_target_path) == (8, 0.75, 0.75)
    assert {name: studied.auroc[name] for name in ("entropy", "margin", "prob", "digits")} == {
        "entropy": 1.0, "margin": 1.0, "prob": 1.0, "digits": 0.5
    }  # fmt: skip
    assert tuple(studied.policies) == HAND_BACKS
    for points in studied.policies.values():
        assert points[0] == (0.75, 0.0, 0.0)  # nothing is sent: the draft model alone
    alone = studied.policies["0"]
    assert (1.0, 0.25, 0.25) in alone  # one call each, as an oracle has it
    for agreement, calls, written in alone:
        assert min(calls, written) >= agreement - 0.75 - 1e-9
    # After the correction at 1: to the end, past that at 4 to 6, until two are the draft model's own, or four.
    ends = {name: next(point[1:] for point in points if point[0] == 1) for name, points in studied.policies.items()}
    assert ends["text"] == ends["8"] == ends["agree:4"] == (0.125, 0.875)
    assert ends["4"] == (0.125, 0.625)
    assert ends["agree:2"] == (0.25, 0.75)  # two after 1, then the correction at 4 and two after it


def test_what_never_disagrees_has_no_auroc(tmp_path: Path) -> None:
    studied = study(findings(tmp_path, [False] * 5))
    assert studied is not None and studied.auroc == {} and studied.alone == 1.0


def test_no_study_without_both_models_alone_or_of_what_was_drawn(tmp_path: Path) -> None:
    flags = [True, False, True]
    assert study(findings(tmp_path, flags)) is not None
    edge, cloud = lines.modes("edge,cloud")
    sampled = replace(edge, params=replace(edge.params, temperature=0.5))
    assert study(findings(tmp_path, flags, modes=(sampled, cloud))) is None
    path = lines.write(tmp_path, lines.run_line(modes=(edge,)), lines.generation(), lines.generation(prompt="b"))
    assert study(Findings(read_records(path))) is None
