"""trustedrouter-provider-check, a suite for whoever offers models behind OpenAI's interface, against a gateway."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.access.keys import Keyring
from skydraft.engines.toy import ToyEngine, character_vocab
from skydraft.gateway.pair import Pair
from tests.gateway.running import Running, gateway

command: Any = pytest.importorskip("tr_provider_check.cli", reason="trustedrouter-provider-check is not installed")

pytestmark = [pytest.mark.conformance, pytest.mark.filterwarnings("default")]
KEY = "a-key-of-more-than-16-characters"
# Needs a feed of prices in TrustedRouter's own form, which is no business of a gateway.
NOT_ASKED = {"catalog.declared-v2"}
# What it looks for beyond a plain chat.
OFFERED = {"tools.parallel-deltas", "tools.round-trip", "structured.json-object", "structured.json-schema"}


def always_says(word: str) -> ToyEngine:
    """A model whose every answer is `word`, of the letters of PING and PONG, each once.

    Under a grammar it ends strings and objects as soon as it may, and begins another call when it may.
    """
    vocab = character_vocab("PINGO:")
    vocab.chat_template = "{{ tools and '' }}{% for m in messages %}{{ m['content'] }}{% endfor %}{# <tool_call> #}:"
    end = max(vocab.end_ids)
    by_last = np.zeros((vocab.size, vocab.size), np.float32)
    by_last[:, end] = 50
    for char, weight in {'"': 30, "}": 20, "0": 10}.items():
        by_last[:, vocab.encode(char)] = weight
    by_last[vocab.encode(">"), vocab.encode("\n")] = 60
    said = [*vocab.encode(f":{word}"), end]
    for last, following in itertools.pairwise(said):
        by_last[last, following] = 100
    engine = ToyEngine(vocab, by_last, name=f"says {word}")
    engine.max_sequences = 6
    return engine


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway with a key over a drafter that is wrong and a target that says PONG, as the suite asks."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"suite {KEY}\n")
    pair = Pair(always_says("PING"), always_says("PONG"))
    with gateway(pair, authorize=Keyring(keys).label) as running:
        yield running


def check(running: Running, tier: int, model: str, report: Path) -> tuple[int, dict[str, Any]]:
    """The exit status, and each check by its name."""
    status = command.main([
        "--base-url", running.v1, "--api-key", KEY, "--tier", str(tier), "--model", model, "--json", str(report),
    ])  # fmt: skip
    return status, {found["id"]: found for found in json.loads(report.read_text())["checks"]}


@pytest.mark.parametrize("model", ["skydraft-lossless", "skydraft-cloud"])
def test_tiers_1_to_4_pass(locked: Running, model: str, tmp_path: Path) -> None:
    status, found = check(locked, 4, model, tmp_path / "report.json")
    assert status == 0
    failed = {name: each for name, each in found.items() if each["status"] != "pass"}
    assert set(failed) == NOT_ASKED, failed
    assert {each["tier"] for each in found.values()} == {1, 2, 3, 4}
    swept = found["callability.advertised-models"]["measured"]["models"]
    assert {each["model"] for each in swept if each["verdict"] == "ok"} >= {"skydraft", "skydraft-quality"}


def test_tier_5_passes(locked: Running, tmp_path: Path) -> None:
    _, found = check(locked, 5, "skydraft-lossless", tmp_path / "report.json")
    fifth = {name: each for name, each in found.items() if each["tier"] == 5}
    assert {name: each["status"] for name, each in fifth.items()} == dict.fromkeys(OFFERED, "pass"), fifth
    assert fifth["tools.parallel-deltas"]["measured"]["tool_call_count"] > 1


def test_the_suite_can_fail(locked: Running, tmp_path: Path) -> None:
    status, found = check(locked, 4, "skydraft-edge", tmp_path / "wrong-draft.json")
    assert status == 1 and found["chat.pong"]["status"] == "fail"
