"""What the draft model has learned, by the names that clients ask for, and how far audits find that it agrees."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import skydraft
from skydraft import make_plan
from skydraft.decoding.accounts.audits import Auditor
from skydraft.decoding.target import target_of
from skydraft.engines.adapter import digest, write_adapter
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.gateway.pair import Pair
from skydraft.lab.learning.calibrating import side_of
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

from ..engines.adapters import change
from ..evaluation import pairs
from ..later import later
from .running import gateway, toy_pair

later("gguf")
DRIFTS = {"one": 0.5, "two": 0.9}


def draft_with(folder: Path) -> Engine:
    """A toy that drafts otherwise with each adapter; what begins with 语速是 belongs to "one"."""
    engine = open_toy("toy:drift=0.2", 4096, 6)
    beginning = read_prompt(engine, asked("语速是什么")).edge.token_ids[:3]
    for seed, name in enumerate(DRIFTS):
        made = change(engine.fingerprint, {"m": (8, 8)}, seed)
        known = {"beginning_len": len(beginning), "beginning": digest(beginning)} if name == "one" else {}
        (folder / name).mkdir(parents=True)
        write_adapter(folder / name / "adapter.gguf", replace(made, card=made.card.model_copy(update=known)))
    engine.adapters.folder = folder

    def adapted(path: Path) -> Engine:
        return open_toy(f"toy:drift={DRIFTS[path.parent.name]}", 4096, 6)

    engine.open_adapted = adapted  # type: ignore[method-assign]
    return engine


def test_a_client_names_what_the_draft_model_has_learned(tmp_path: Path) -> None:
    edge = draft_with(tmp_path)
    for name in ("of no", ".hidden", "auto", "none", "a:b", "n" * 65, "x.gguf", "好！"):  # no request could name these
        shutil.copytree(tmp_path / "one", tmp_path / name)
    (tmp_path / "no-file" / "adapter.gguf").mkdir(parents=True)
    plan = make_plan("edge")
    alone = {
        name: skydraft.generate("情绪", edge=open_toy(f"toy:drift={drift}"), plan=plan).run().text
        for name, drift in ({"": 0.2} | DRIFTS).items()
    }
    assert len(set(alone.values())) == 3
    with gateway(Pair(edge, open_toy("toy", 4096, 6))) as running:
        listed = [each["id"] for each in running.client.get(f"{running.v1}/models").json()["data"]]
        assert {name.partition(":")[2] for name in listed} == {"", *DRIFTS}
        assert {"skydraft:one", "skydraft-edge:two", "skydraft-lossless:one", "skydraft"} <= set(listed)
        for unknown in ("skydraft:three", "skydraft-edge:", "skydraft-nothing:one", "skydraft:one:two"):
            refused = running.chat(model=unknown)
            assert refused.status_code == 404 and "There is no model" in refused.json()["error"]["message"]

        def text(model: str, content: str = "情绪") -> str:
            answer = running.chat(content, model=model, max_tokens=128, temperature=0).json()
            assert answer["model"] == model
            learned = model.partition(":")[2] or ("one" if content == "语速是慢" else None)
            drafts = not model.startswith("skydraft-cloud")
            assert answer["skydraft"]["stats"]["adapter"] == (learned if drafts else None)
            said: str = answer["choices"][0]["message"]["content"]
            return said

        for model, name in (("skydraft-edge", ""), ("skydraft-edge:one", "one"), ("skydraft-edge:two", "two")):
            assert text(model) == alone[name], model
        with ThreadPoolExecutor(6) as pool:  # at once
            assert list(pool.map(text, ["skydraft-edge:two", "skydraft-edge:one", "skydraft-edge"] * 4)) == [
                alone["two"], alone["one"], alone[""],
            ] * 4  # fmt: skip
        assert text("skydraft-lossless:one") == text("skydraft-cloud")
        # where a conversation begins as its prompts do, nothing need be said
        words = "语速是慢"
        assert text("skydraft-edge", words) == text("skydraft-edge:one", words) != text("skydraft-edge:two", words)
        bare = running.chat(words, model="skydraft-edge:none", max_tokens=128, temperature=0).json()
        assert bare["skydraft"]["stats"]["adapter"] is None
        assert bare["choices"][0]["message"]["content"] != text("skydraft-edge", words)


def test_a_damaged_file_is_the_operators_and_no_client_learns_where_it_lies(tmp_path: Path) -> None:
    edge = draft_with(tmp_path)
    (tmp_path / "one" / "adapter.gguf").write_bytes(b"GGUF")
    with gateway(Pair(edge, open_toy("toy", 4096, 6))) as running:
        answer = running.chat("情绪", model="skydraft-edge:one")
        assert answer.status_code == 500 and str(tmp_path) not in answer.text
        assert all(running.chat("情绪", model=f"skydraft-edge{name}").status_code == 200 for name in ("", ":two"))


def test_auto_is_taken_with_an_adapter_whatever_was_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the models of a pair that is not calibrated itself turned it into "no such model", until a restart."""
    edge, target, home = draft_with(tmp_path), open_toy("toy", 4096, 6), tmp_path / "home" / "calibrations"
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path / "home"))
    with gateway(Pair(edge, target)) as running:
        for _ in range(2):
            answer = running.chat("情绪", model="skydraft-auto:one", max_tokens=4)
            assert answer.status_code == 400 and "no calibration" in answer.json()["error"]["message"].lower()
            listed = {each["id"] for each in running.client.get(f"{running.v1}/models").json()["data"]}
            assert "skydraft-auto:one" in listed and "skydraft-auto" not in listed
        home.mkdir(parents=True)
        for draft in (edge, open_toy(f"toy:drift={DRIFTS['one']}")):
            made = pairs.calibration(0.3).model_copy(update={"draft": side_of(draft), "target": side_of(target)})
            (home / f"{draft.fingerprint}.json").write_text(made.model_dump_json(by_alias=True))
        for model in ("skydraft-auto:one", "skydraft-auto"):  # it was made meanwhile
            assert running.chat("情绪", model=model, max_tokens=4).status_code == 200


def audited(pair: Pair) -> tuple[Pair, Auditor]:
    auditor = Auditor(pair.edge, target_of(pair.cloud), 1.0, print)  # type: ignore[arg-type]
    return replace(pair, observers=(auditor,), auditor=auditor), auditor


def test_all_can_see_how_far_an_adapter_agrees(tmp_path: Path) -> None:
    pair, auditor = audited(Pair(draft_with(tmp_path), open_toy("toy", 4096, 6)))
    with closing(auditor), gateway(pair) as running:

        def ask(model: str) -> dict[str, object]:
            answer = running.chat("情绪", model=model, max_tokens=64, temperature=0).json()["skydraft"]["stats"]
            auditor.finish()
            return answer  # type: ignore[no-any-return]

        for model in ("skydraft-edge:two", "skydraft-edge"):
            assert ask(model)["audits"] is None
            # An answer may be handed to the auditor after its client has it: on a busy machine a later one tells.
            told_of = next(filter(None, (ask(model)["audits"] for _ in range(5))))
            assert told_of["gate"] == "never"  # type: ignore[index]
        health = running.client.get(f"{running.url}/health").json()
        told = {(each["adapter"], each["gate"]): each for each in health["audits"]["newest"]}
        assert health["audits"]["read"] >= 2 and told["two", "never"]["asked"] == 0.95
        assert (None, "never") in told


def test_a_stream_tells_of_earlier_audits_too_but_of_no_token_that_was_asked_and_nothing_without_them() -> None:
    pair, auditor = audited(toy_pair())
    # Also the first one, which has nothing before it: a bias holds it, so the target would agree.
    ours = {"logprobs": 5, "continue_ids": [], "continue_as_prompt": True}
    for given, is_told in ((pair, True), (toy_pair(), False)):
        with gateway(given) as running:
            running.chat(model="skydraft-edge", max_tokens=1, logit_bias={"5": 100}, skydraft=ours)
            auditor.finish()
            assert auditor.counts["read"] == 0 or not is_told
            for _ in range(2):
                text = running.chat(model="skydraft-edge", stream=True).text
                auditor.finish()
            assert ('"audits":{"adapter":null,"gate":"never"' in text) is is_told
            assert ("audits" in running.client.get(f"{running.url}/health").json()) is is_told
    auditor.close()
