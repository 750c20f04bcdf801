"""Failures seen in practice, F9 to F15: what Chinese text and its measures need. F16 comes with speech."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import skydraft
from skydraft.characters import COMMA_LIKE, is_cjk, punctuation_density
from skydraft.choosing.chooser import Chooser
from skydraft.config import MODES, STYLES, DecodingParams, decoding_params
from skydraft.decoding.context import Context
from skydraft.decoding.plan import make_plan
from skydraft.engines.base import Rows, Sequence
from skydraft.engines.toy import ToyEngine, character_vocab, random_toy
from skydraft.engines.vocab import Vocab
from skydraft.gating.gates import ThresholdGate, parse_gate
from skydraft.types import DraftBlock, Prompt, Signals

WORDS = "今天气很好我们去公园走路看花听风说话员在的一是有人"
VOCAB = character_vocab(WORDS + "，。！3.5,abc ")


def loving(*favourites: str) -> ToyEngine:
    """A model that wants the given characters everywhere, the first one most; the rest is a fixed random order."""
    row = np.random.default_rng(0).normal(0, 1, VOCAB.size).astype(np.float32)
    row[len(WORDS) + 10 :] = -20  # bytes and the end token
    for rank, char in enumerate(favourites):
        row[VOCAB.encode(char)[0]] = 12 - rank
    return ToyEngine(VOCAB, np.tile(row, (VOCAB.size, 1)))


def write(engine: ToyEngine, **given: object) -> str:
    params = decoding_params(**{"max_new_tokens": 60, **given})  # type: ignore[arg-type]
    with skydraft.generate("今天天气", edge=engine, plan=make_plan("edge"), params=params) as generation:
        return generation.run().text


def adjacent_repeats(text: str) -> int:
    return sum(a == b and is_cjk(a) for a, b in itertools.pairwise(text))


def test_f9_no_adjacent_repeats_and_no_short_loops_through_punctuation() -> None:
    assert adjacent_repeats(write(loving("员", "在"))) > 10
    text = write(loving("员", "在"), style="zh-short", sentences=0)
    assert adjacent_repeats(text) == 0
    content = [char for char in text if is_cjk(char)]
    bigrams = list(itertools.pairwise(content))
    assert len(bigrams) == len(set(bigrams)) > 10


def test_f9_a_comma_does_not_hide_a_repeated_pair() -> None:
    chooser = Chooser(decoding_params(content_ngram_size=2), VOCAB, 0)
    row = np.zeros(VOCAB.size, np.float32)
    prefix = np.array(VOCAB.encode("员在，员"), np.int32)
    edited = chooser.constrain(row, prefix)
    assert np.flatnonzero(edited == -np.inf).tolist() == list(VOCAB.encode("在"))


def gaps_between_commas(text: str) -> list[int]:
    gaps, run = [], 0
    for char in text:
        if char in COMMA_LIKE:
            gaps.append(run)
        run = 0 if not is_cjk(char) else run + 1
    return gaps


def test_f10_a_comma_needs_four_characters_before_it() -> None:
    assert min(gaps_between_commas(write(loving("，", "员")))) == 0
    gaps = gaps_between_commas(write(loving("，", "员"), comma_gap=4))
    assert len(gaps) > 5
    assert min(gaps) >= 4


def test_f10_a_full_stop_is_made_unlikely_and_not_impossible_before_eight() -> None:
    chooser = Chooser(decoding_params("zh-short"), VOCAB, 0)
    row = np.zeros(VOCAB.size, np.float32)
    stop = VOCAB.encode("。")[0]
    early, late = (np.array(VOCAB.encode(text), np.int32) for text in ("今天气很好我们", "今天气很好我们去"))
    assert chooser.constrain(row, early)[stop] == -8
    assert chooser.constrain(row, late)[stop] == 0


def test_f10_numbers_keep_their_points_and_commas() -> None:
    chooser = Chooser(decoding_params("zh-short"), VOCAB, 0)
    row = np.zeros(VOCAB.size, np.float32)
    edited = chooser.constrain(row, np.array(VOCAB.encode("有3"), np.int32))
    point, comma, wide = (VOCAB.encode(char)[0] for char in ".,，")
    assert edited[point] == 0
    assert edited[comma] == 0
    assert edited[wide] == -np.inf


def test_f11_density_is_counted_on_characters_of_merged_tokens_and_width_variants() -> None:
    pieces = [*(char.encode() for char in "，好今天气很我们"), "，，，，".encode(), "﹐".encode(), b",", b"<eos>"]
    vocab = Vocab(pieces, lambda text: [0], special_ids=[11], end_ids=[11])
    sure = Signals(0.0, 1.0, 1.0)
    gate = ThresholdGate(parse_gate("entropy:5"))

    def reason(token_ids: tuple[int, ...]) -> str:
        block = DraftBlock(0, token_ids, (sure,) * len(token_ids))
        return gate.reason(Context(Prompt((0, 0, 0))), block, vocab)

    assert reason((1, 2, 8)) == "density"  # one of three tokens, but four of six characters
    assert reason((1, 9, 2, 10)) == "density"  # both of other widths
    assert reason((1, 8, 2, 3, 4, 5, 6, 7)) == ""  # 4 of 11 characters
    assert punctuation_density("好﹐好,好，") == 0.5
    classes = vocab.classes
    assert np.flatnonzero(classes.comma).tolist() == [0, 8, 9, 10]


def test_f12_penalties_leave_punctuation_alone() -> None:
    chooser = Chooser(decoding_params("zh-short", min_new_tokens=0), VOCAB, 0)
    row = np.full(VOCAB.size, 2.0, np.float32)
    text = "今天气很好，我们去公园走路。看花听风说话有人"
    edited = chooser.constrain(row, np.array(VOCAB.encode(text), np.int32))
    comma, stop, repeated, fresh = (VOCAB.encode(char)[0] for char in "，。今员")
    assert edited[comma] == edited[stop] == edited[fresh] == 2.0
    assert edited[repeated] == pytest.approx(2.0 / 1.22)


def test_f13_generation_stops_at_the_sentence_and_not_before_the_minimum() -> None:
    ids = VOCAB.encode("今天气很好。我们去公园走路看花听风。说话。")
    table = np.full((VOCAB.size, VOCAB.size), -9.0, np.float32)
    script = ScriptedToy(VOCAB, table, list(ids))
    params = decoding_params(sentences=1, min_new_tokens=8)
    with skydraft.generate("人", edge=script, plan=make_plan("edge"), params=params) as generation:
        generation.run()
    assert generation.text == "今天气很好。我们去公园走路看花听风。"
    assert generation.finish_reason == "sentences"


class ScriptedToy(ToyEngine):
    """Says a fixed text, one token after the other, from the end of the prompt on."""

    def __init__(self, vocab: Vocab, table: np.ndarray, script: list[int]) -> None:
        super().__init__(vocab, table)
        self.script = script

    def forward(self, feeds: list[tuple[Sequence, list[int]]], *, want_logits: bool) -> list[Rows]:  # type: ignore[override]
        rows = super().forward(feeds, want_logits=want_logits)
        for (sequence, token_ids), found in zip(feeds, rows, strict=True):
            for index in range(len(token_ids) if want_logits else 0):
                found[index] = -9
                found[index, self.script[(sequence.length + index) % len(self.script)]] = 9
        return rows


def test_f13_a_model_that_has_said_its_sentence_may_end_before_the_minimum() -> None:
    end = VOCAB.size - 1
    params = decoding_params(sentences=1, min_new_tokens=16)
    for script, expected in (("今天气很好。", "今天气很好。"), ("今天气很好", "今天气很好今")):
        toy = ScriptedToy(VOCAB, np.zeros((VOCAB.size, VOCAB.size), np.float32), [*VOCAB.encode(script), end])
        with skydraft.generate("人", edge=toy, plan=make_plan("edge"), params=params) as generation:
            text = generation.run().text
        assert text.startswith(expected)
        assert (len(generation.token_ids) < 16) == (script[-1] == "。")


def test_f13_the_style_asks_for_one_sentence_of_sixteen_tokens() -> None:
    short, detailed = STYLES["zh-short"], STYLES["zh-detailed"]
    assert (short["sentences"], short["min_new_tokens"]) == (1, 16)
    assert (detailed["sentences"], detailed["min_new_tokens"]) == (2, 32)
    assert {k: v for k, v in short.items() if k not in ("sentences", "min_new_tokens")} == {
        k: v for k, v in detailed.items() if k not in ("sentences", "min_new_tokens")
    }


@pytest.mark.parametrize("gate", ["entropy:1.5", "margin:0.3", "prob:0.4"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_f14_skipped_segments_are_what_the_edge_alone_would_have_written(gate: str, temperature: float) -> None:
    edge, cloud = random_toy(VOCAB, drift=0.3, scale=4), random_toy(VOCAB, scale=4)
    params = decoding_params(temperature=temperature, seed=5, max_new_tokens=60)
    with skydraft.generate("今天天气", edge=edge, cloud=cloud, plan=make_plan(gate=gate, k=4), params=params) as mixed:
        mixed.run()
    skipped = [record for record in mixed.records if record.outcome == "skipped"]
    assert 0 < len(skipped) < len(mixed.records)
    all_ids = [*VOCAB.encode("今天天气"), *mixed.token_ids]
    chooser = Chooser(params, VOCAB, mixed.num_prompt_tokens)
    for record in skipped:
        begin = mixed.num_prompt_tokens + record.base
        prefix = all_ids[:begin]
        for token_id in all_ids[begin : begin + record.num_committed]:
            sequence = edge.open(prefix)
            row = sequence.extend(prefix[-1:])[0]
            assert chooser.choose(row, np.array(prefix, np.int32)) == token_id
            prefix.append(token_id)


def test_f15_blocks_are_whole_unless_asked_otherwise() -> None:
    edge, cloud = random_toy(VOCAB, drift=0.5, scale=1.0), random_toy(VOCAB, scale=1.0)
    params = DecodingParams(max_new_tokens=60)

    def block_lengths(eager: bool) -> list[int]:
        plan = make_plan(gate="entropy:1.5", k=4, eager=eager)
        with skydraft.generate("今天天气", edge=edge, cloud=cloud, plan=plan, params=params) as generation:
            records = generation.run().records
            return [record.num_draft for record in records if record.base + 4 <= 60]

    assert set(block_lengths(eager=False)) == {4}
    assert min(block_lengths(eager=True)) < 4


def test_f15_the_presets_are_the_ones_that_were_measured(as_shipped: None) -> None:
    assert (MODES["fluency"].gate, MODES["fluency"].k) == ("entropy:5.5", 4)
    assert (MODES["quality"].gate, MODES["quality"].k) == ("entropy:3.25", 6)
    assert (MODES["lossless"].gate, MODES["lossless"].k) == ("always", "auto")
