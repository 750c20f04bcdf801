"""`skydraft doctor --devices`: what so many devices get from a server, measured."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from skydraft.cli.doctor import _checks
from skydraft.cli.doctor_cloud import _MODES, PROMPTS, CheckChoice, _measure_devices
from skydraft.cli.pair_options import CloudChoice
from skydraft.config import DecodingParams
from skydraft.decoding.plan import make_plan
from skydraft.engines.adapter import digest, write_adapter
from skydraft.engines.base import Engine
from skydraft.engines.toy import open_toy
from skydraft.errors import PromptError
from skydraft.evaluation.comparison import request_of
from skydraft.evaluation.devices import KeptRows
from skydraft.evaluation.modes import Mode
from skydraft.evaluation.records import PromptEntry
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt

from ..engines.adapters import change
from ..evaluation import pairs
from ..later import later
from ..serving import serving
from ..stock.fakes import GENERATING, fake
from .conftest import Invoke

later("gguf")
EDGE = ["--edge-model", "toy:drift=0.3"]
ROW = re.compile(
    r"^ +(\S+) +(0\.\d+|1\.000)? +([\d.]+) +([\d.]+)(?: +([\d.]+) ms +([\d.]+) ms)?(?: +([\d.]+))? *$", re.M
)


@pytest.fixture(scope="module", params=["own", "vllm"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "own":
        with serving(open_toy("toy"), max_sessions=2) as server:
            yield server.address
    else:
        with fake("vllm") as stock:
            yield f"{stock.url}/v1"


def test_the_devices_draft_with_the_adapter_that_their_prompts_choose(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `generate` does. They were measured without it where it was not named."""
    edge, adapted, kept = open_toy("toy"), open_toy("toy:drift=0.1"), list[Engine]()
    made = change(edge.fingerprint, {"m": (8, 8)})
    (tmp_path / "one").mkdir()
    first = read_prompt(edge, asked("语速")).edge.token_ids[:1]
    card = made.card.model_copy(update={"beginning_len": 1, "beginning": digest(first)})
    write_adapter(tmp_path / "one" / "adapter.gguf", replace(made, card=card))
    edge.adapters.folder = tmp_path
    monkeypatch.setattr(edge, "open_adapted", lambda path: adapted)

    def keep(engine: Engine) -> KeptRows:
        kept.append(engine)
        return KeptRows(engine)

    monkeypatch.setattr("skydraft.cli.doctor_cloud.KeptRows", keep)
    prompts = [PromptEntry(id=text, prompt=text) for text in ("语速", "语速慢")]
    checks = CheckChoice(False, False, 1, 0.05, prompts)
    for given, engine in (("auto", adapted), ("none", edge), ("one", adapted)):
        edge.adapters.default = given
        list(_measure_devices(Console(width=200), CloudChoice(address), None, edge, checks))
        assert kept.pop() is engine
        assert ("what the draft model says with one;" in capsys.readouterr().out) == (engine is adapted)


def test_what_was_not_measured_is_no_figure(
    address: str, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing had an agreement of 1 and waits of 0 ms, carried most, and left nothing to repair."""
    asks = ("doctor", "--cloud", address, *EDGE, "--devices", "2")
    with monkeypatch.context() as patch:
        patch.setattr("skydraft.evaluation.devices.Client.write", lambda *given: None)  # nothing comes in time
        status, out, _ = invoke(*asks, "--seconds", "0.01")
    assert status == 1 and "give more with --seconds" in out and "Nothing to repair" not in out
    table = out.partition("/ streaming")[2]
    assert "0.0 ms" not in table and "1.000" not in table and "carries most" not in table
    task = {"prompt": "语速", "grammar": "regex:[a", "check": {"kind": "exact", "answer": "a"}}
    (tmp_path / "bad.jsonl").write_text(json.dumps(task), encoding="utf-8")
    status, out, _ = invoke(*asks, "--seconds", "0.1", "--tasks", str(tmp_path / "bad.jsonl"))
    assert status == 1 and "no mode was measured" in out and "Nothing to repair" not in out


def test_each_text_has_a_place_of_its_own_in_the_draft_model(
    address: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one place for all of them it read a whole text for each token that was not recorded: 0.07 of streaming."""
    places = list[int]()

    def keep(engine: Engine) -> KeptRows:
        places.append(engine.max_sequences)
        return KeptRows(engine)

    monkeypatch.setattr("skydraft.cli.doctor_cloud.KeptRows", keep)
    asks = ("doctor", "--cloud", address, *EDGE, "--devices", "2", "--seconds", "0.1")
    line = json.dumps({"prompt": "语速", "check": {"kind": "exact", "answer": "快"}})
    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for path in files:
        path.write_text(f"{line}\n" * 9, encoding="utf-8")
    for more in ((), ("--tasks", ",".join(map(str, files)))):  # on a busy machine nothing may come in time
        assert invoke(*asks, *more)[0] in (0, 1)
    assert places == [len(PROMPTS), 16]
    assert _MODES.index("lossless;k=5") < _MODES.index(",lossless,")


def test_tasks_are_asked_with_all_that_is_theirs_and_a_recording_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    """They were asked without schema, turns and tools, and ended at 128 tokens, without a word."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    own = {"prompt": "语速", "grammar": "regex:快|慢", "max_new_tokens": 320}
    turns = {"messages": [{"role": "system", "content": "短"}, {"role": "user", "content": "语速"}], "tools": tools}
    path, check = tmp_path / "tasks.jsonl", {"kind": "exact", "answer": "快"}
    path.write_text("\n".join(json.dumps({**each, "check": check}) for each in (own, turns)), encoding="utf-8")
    checks = _checks(str(path), no_measure=False, probe_again=False, devices=2, seconds=1.0)
    asked_for = [request_of(each, Mode("edge", make_plan("edge"), DecodingParams())) for each in checks.prompts]
    params = [each.params for each in asked_for]
    assert [(each.grammar, each.max_new_tokens) for each in params] == [("regex:快|慢", 320), ("", 128)]
    assert [message.content for message in asked_for[1].messages] == ["短", "语速"] and asked_for[1].tools == (*tools,)
    path.write_text("")
    with pytest.raises(PromptError, match=r"tasks\.jsonl holds no task"):
        _checks(str(path), no_measure=False, probe_again=False, devices=2, seconds=1.0)
    path.write_text(json.dumps({"audio": "a.wav", "check": check}), encoding="utf-8")
    status, out, err = invoke("doctor", "--cloud", "localhost:1", *EDGE, "--devices", "2", "--tasks", str(path))
    assert (status, out) == (2, "") and "has a recording" in err and len(err.splitlines()) == 1


def test_each_mode_is_measured_with_so_many_devices(address: str, invoke: Invoke, tmp_path: Path) -> None:
    """Also with more devices than the server has seats. Modes that this server does not take are named."""
    task = {"id": "long", "prompt": "语速" * 40, "check": {"kind": "exact", "answer": "快"}}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task), encoding="utf-8")
    (tmp_path / "home" / "calibrations").mkdir(parents=True)
    made = pairs.calibration(0.3).model_dump_json(by_alias=True)
    (tmp_path / "home" / "calibrations" / "toy.json").write_text(made, encoding="utf-8")
    tasks = ("--tasks", str(tmp_path / "tasks.jsonl"))
    status, out, err = invoke("doctor", "--cloud", address, *EDGE, "--devices", "3", "--seconds", "1", *tasks)
    assert "text after text of 1 prompts" in out
    assert "devices      3 at once, 1 s in each mode" in out and "Real: " in out and "Recorded: " in out
    rows = {name: [float(figure or 0) for figure in figures] for name, _, *figures in ROW.findall(out)}
    kept = {name: float(agreement) for name, agreement, *_ in ROW.findall(out) if agreement}
    assert status == (not all(speed for speed, *_ in rows.values())), err  # on a busy machine nothing may have come
    assert kept.get("cloud", 1) == kept.get("lossless", 1) == 1
    for least, best in re.findall(r"agreement of ([\d.]+) or more it carries most in mode (\S+)\.$", out, re.M):
        assert rows[best][0] == max(rows[name][0] for name in kept if kept[name] >= float(least))
    first, *others = rows
    refused = set(re.findall(r"not measured: mode (\S+): ", out))
    assert first == "cloud" and {*others, *refused} == set(_MODES.split(",")) - {"cloud"}
    assert refused == ({"lossless;k=5"} if address.startswith("http") else set())  # it does not draft losslessly
    for speed, each, wait_ms, late_ms, ratio in rows.values():
        assert each == pytest.approx(speed / 3, abs=0.06) and 0 <= wait_ms <= late_ms
        if streams := rows["cloud"][0]:
            assert ratio == pytest.approx(speed / streams, abs=0.05, rel=0.05)


@pytest.mark.parametrize(
    ("fluency", "says"),
    [(15.0, "fluency is 1.50 times as fast as streaming here"), (10.5, "streaming is about as fast here"),
     (9.5, "streaming is about as fast here"), (8.0, "streaming is faster here (1.25 times as fast as fluency)")],
)  # fmt: skip
def test_the_verdict_of_a_server_without_skydraft_is_of_timed_texts(
    fluency: float, says: str, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    with fake("vllm") as stock:
        stock.fault_of = asked.append
        _, out, _ = invoke("doctor", "--cloud", f"{stock.url}/v1", *EDGE)
        speeds = r"^speed +quality \(it streams\) [\d.]+ tokens/s, fluency [\d.]+ \(short texts, up to 32 tokens"
        assert re.search(speeds, out, re.M) and sum(path in GENERATING for path in asked) >= 2 + 5
        monkeypatch.setattr("skydraft.cli.doctor_cloud._speeds", lambda *given: {"cloud": 10.0, "fluency": fluency})
        _, out, _ = invoke("doctor", "--cloud", f"{stock.url}/v1", *EDGE)
    assert f"verdict      {says}; in fluency the server writes less" in out
