"""The figures of a report once more, from the lines of records.jsonl as plain JSON: nothing of the package's sums.

`tables_of` reads the tables of a page, so that what is printed can be compared too.
"""

import html
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]
Pair = tuple[float, float]


def style_of(mode: str) -> str | None:
    found = [part.partition("=")[2] for part in mode.split(";") if part.startswith("style=")]
    return found[0] if found else None


def at(record: Line, place: str) -> float:
    """A number inside a record, by the names on the way to it."""
    found: Any = record
    for step in place.split("."):
        found = found[step]
    return float(found)


def name_of(line: Line) -> str:
    return line["mode"] if line["link_ms"] is None else f"{line['mode']} @ {line['link_ms']:g} ms"


class Recount:
    """`pairs[setting][measure]` is [(above, below) of each prompt]."""

    def __init__(self, path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        self.run = lines[0]
        self.generations = [line for line in lines if line["kind"] == "generation"]
        self.scores = {
            (line["prompt"], line["style"], tuple(line["token_ids"])): line for line in lines if line["kind"] == "score"
        }
        found: dict[str, dict[str, dict[str, list[Pair]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
        for line in self.generations:
            for measure, pair in self.counts(line).items():
                found[name_of(line)][measure][line["prompt"]].append(pair)
        self.pairs = {
            setting: {
                measure: [(sum(a for a, _ in cases), sum(b for _, b in cases)) for cases in by_prompt.values()]
                for measure, by_prompt in measures.items()
            }
            for setting, measures in found.items()
        }

    def of(self, setting: str) -> list[Line]:
        return [line for line in self.generations if name_of(line) == setting]

    def score(self, line: Line) -> Line | None:
        return self.scores.get((line["prompt"], style_of(line["mode"]), tuple(line["token_ids"])))

    def value(self, setting: str, measure: str) -> float | None:
        pairs = self.pairs[setting][measure]
        below = sum(b for _, b in pairs)
        return sum(a for a, _ in pairs) / below if below else None

    def interval(self, setting: str, measure: str) -> Pair:
        """By drawing prompts again, one resample after the other."""
        pairs = self.pairs[setting][measure]
        ratios = []
        for draw in np.random.default_rng(0).integers(len(pairs), size=(2000, len(pairs))).tolist():
            below = sum(pairs[at][1] for at in draw)
            if below:
                ratios.append(sum(pairs[at][0] for at in draw) / below)
        low, high = np.quantile(ratios, [0.025, 0.975])
        return float(low), float(high)

    def counts(self, line: Line) -> dict[str, Pair]:
        return self._of_models(line) | self._of_rounds(line)

    def _of_models(self, line: Line) -> dict[str, Pair]:
        tokens, score = line["token_ids"], self.score(line)
        agreed = sum(tokens[at] == score["choices"][at] for at in range(len(tokens))) if score else 0
        scored = len(tokens) if score else 0
        cloud = [
            other["token_ids"] for other in self.generations
            if other["link_ms"] is None and other["prompt"] == line["prompt"]
            and other["mode"].split(";")[0] == "cloud" and style_of(other["mode"]) == style_of(line["mode"])
        ]  # fmt: skip
        return {
            "target_agreement": (agreed, scored),
            "target_nll": (math.fsum(score["nll"]) if score else 0, scored),
            "same_as_cloud": (tokens == cloud[0], 1) if cloud else (0, 0),
            "cycles": (sum(_cycles(tokens, period) for period in range(1, 9)), 1),
        }

    def _of_rounds(self, line: Line) -> dict[str, Pair]:
        rounds, num_tokens = [entry["record"] for entry in line["rounds"]], len(line["token_ids"])
        judged = [record for record in rounds if record["outcome"] == "verified"]
        by_target = [record for record in rounds if record["outcome"] in ("verified", "written")]

        def total(place: str, of: list[Line] = rounds) -> float:
            return math.fsum(at(record, place) for record in of)

        num_bytes = total("link.bytes_up") + total("link.bytes_down")
        overhead = [
            record["wall_ms"] - at(record, "draft.forward_ms")
            - (at(record, "link.rtt_ms") or at(record, "target.queue_ms") + at(record, "target.forward_ms"))
            for record in rounds
        ]  # fmt: skip
        return {
            "cloud_calls_per_token": (len(judged), num_tokens),
            "target_written_per_token": (
                total("num_committed", by_target) - total("num_accepted", by_target), num_tokens),
            "target_passes_per_token": (total("target.num_passes"), num_tokens),
            "target_rows_per_token": (total("target.num_rows"), num_tokens),
            "acceptance_rate": (total("num_accepted", judged), total("num_draft", judged)),
            "mean_acceptance_length": (total("num_committed", judged), len(judged)),
            "audited_agreement": (total("num_agreed"), total("num_audited")),
            "tokens_per_s": (num_tokens, line["wall_ms"] / 1e3),
            "ttft_ms": (rounds[0]["ended_ms"], 1),
            "itl_ms": (rounds[-1]["ended_ms"] - rounds[0]["ended_ms"], num_tokens - rounds[0]["num_committed"]),
            "draft_ms_per_token": (total("draft.forward_ms"), num_tokens),
            "target_ms_per_token": (total("target.forward_ms"), num_tokens),
            "overhead_ms_per_round": (math.fsum(overhead), len(rounds)),
            "bytes_per_token": (num_bytes, num_tokens) if num_bytes or line["link_ms"] is not None else (0, 0),
        }  # fmt: skip


def _cycles(tokens: list[int], period: int) -> int:
    """Places where a cycle of this period has gone round twice (one token: four in a row) for the first time."""
    size = (4 if period == 1 else 2) * period

    def goes_round(end: int) -> bool:
        return end >= size and tokens[end - size : end] == tokens[end - period : end] * (size // period)

    def counts(cycle: list[int]) -> bool:
        shorter = any(cycle == cycle[:part] * (period // part) for part in range(1, period) if period % part == 0)
        return not shorter and len(set(cycle)) <= 4

    ends = [end for end in range(len(tokens) + 1) if goes_round(end) and not goes_round(end - 1)]
    return sum(counts(tokens[end - period : end]) for end in ends)


def _cell(written: str) -> tuple[str, str]:
    """(Text of a cell, what stands small below it)."""
    text, _, small = written.partition('<span class="interval">')
    return html.unescape(text), html.unescape(small.removesuffix("</span>"))


def tables_of(page: str) -> list[dict[str, dict[str, tuple[str, str]]]]:
    """Tables as {row name: {column head: (value, interval)}}."""
    found = []
    for table in re.findall("<table.*?</table>", page, re.DOTALL):
        written = [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>.*?</tr>", table, re.DOTALL)]
        head, *rows = ([_cell(cell) for cell in row] for row in written)
        names = [name for name, _ in head[1:]]
        found.append({row[0][0]: dict(zip(names, row[1:], strict=True)) for row in rows})
    return found
