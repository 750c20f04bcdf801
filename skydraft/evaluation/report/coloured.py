"""A text on the page, token by token: coloured by where each token came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skydraft.evaluation.measures import Case

ORIGIN_MARKS = {
    "accepted": "a", "recovered": "r", "bonus": "b", "skipped": "s", "edge": "e", "cloud": "c", "edge-fallback": "f",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A token on the page: its text, its class by origin, whether the target disagrees, and its tooltip."""

    text: str
    mark: str
    disagrees: bool
    tells: str


Coloured = tuple[str, str, list[Piece]]  # the name of the row, how the text ended, its tokens


def coloured(name: str, case: Case) -> Coloured:
    rounds = [record.round for record in case.generation.records for _ in range(record.num_committed)]
    return name, case.generation.finish, [_piece(case, index, rounds) for index in range(case.num_tokens)]


def _visible(text: str) -> str:
    """The text with symbols for control characters; line breaks and tabs stay."""
    return "".join(chr(0x2400 + ord(char)) if ord(char) < 32 and char not in "\n\t" else char for char in text)


def _piece(case: Case, index: int, rounds: Sequence[int]) -> Piece:
    line, score = case.generation, case.score
    tells = [line.origins[index], f"round {rounds[index]}"]
    disagrees = False
    if score:
        disagrees = score.choices[index] != line.token_ids[index]
        tells.append(f"entropy {score.signals[index][0]:.2f} nats")
        choice = _visible(score.choice_pieces[index]).replace("\n", "↵")
        tells.append(f"target: {choice}" if disagrees else "target agrees")
    return Piece(_visible(line.pieces[index]), ORIGIN_MARKS[line.origins[index]], disagrees, " · ".join(tells))
