"""How users reach servers without skydraft: what is an address, and that a connection is as safe as it says; the
commands of docs/servers.md, with toys and imitations in place of the models and servers that they name.

A gateway over such servers: its keys share their prefix cache, and none learns what another asked; what its answers
have cost is told with each answer and in the sum of the day, and refused beyond the limit.
"""

import shlex
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.cli.main import run
from skydraft.edge.stock.connection import StockOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError
from skydraft.types import LinkCost
from tests.docs.pages import blocks_of, commands_of
from tests.gateway.interfaces import events_of, plain
from tests.gateway.running import Running
from tests.gateway.running import over as gateway_over
from tests.hostile.texts import DRAFT, TARGET
from tests.serving import serving
from tests.stock.fakes import IDS, fake
from tests.stock.test_money import DIALECTS, PRICES
from tests.thinking.scripts import thinking_toy


@pytest.mark.parametrize("given", [
    "http://[::1", "http://h:99999/v1", "http://a:1,http://b:2", "http://a:1,b:2", "http://", "http://u:p@h/v1",
    "http://h/v1?x=1", "http://h/v1#x", "ftp://h",
])  # fmt: skip
def test_what_is_no_address_is_refused_in_one_line(given: str) -> None:
    with pytest.raises(OptionError, match="not the address of a server") as refused:
        StockOptions(given)
    assert "\n" not in refused.value.line


@pytest.mark.parametrize(("given", "api", "root", "base"), [
    ("https://h:1", "auto", "https://h:1", "https://h:1/v1"),
    ("HTTPS://Host:1/v1/", "vllm", "https://Host:1", "https://Host:1/v1"),
    ("https://h:1/box", "vllm", "https://h:1/box", "https://h:1/box/v1"),
    ("https://h:1/box/v1", "auto", "https://h:1/box", "https://h:1/box/v1"),
    *((f"https://h/api/v3{end}", api, "https://h/api", "https://h/api/v3")
      for end, api in (("", "chat"), ("/", "auto"))),
    ("https://h/beta", "chat", "https://h/beta", "https://h/beta"),
    ("https://h/v1beta/openai/", "auto", "https://h/v1beta", "https://h/v1beta/openai"),
])  # fmt: skip
def test_an_address_with_a_path_is_taken_as_it_stands(given: str, api: str, root: str, base: str) -> None:
    options = StockOptions(given, api=api, key="secret")
    assert options.uses_tls and options.roots == (root, base)


@pytest.mark.parametrize(("given", "key"), [
    *((given, None) for given in (
        "http://user:SECRET@host/v1", "http://user:SE/CRET@host:80/v1", "http://SECRET@host", "user:SECRET@host:7373",
        "SECRET@host:7373", "a:1,user:SECRET@b:2", "user:SECRET@:7373", "https://u:SEC@RET@h/v1?x=1", "h:SECRET@x",
    )),
    *(("http://127.0.0.1:9/v1", key) for key in ("SECRET\r\nX: y", "SECRET密钥", "SECRET ", "SEC\0RET", "")),
])  # fmt: skip
def test_no_password_and_no_key_that_no_header_can_carry_is_told(given: str, key: str | None) -> None:
    with pytest.raises(OptionError) as refused:
        skydraft.connect(given, token=key)
    assert "SE" not in refused.value.line and "RET" not in refused.value.line


@pytest.mark.parametrize("key", [None, "secret"])
def test_texts_and_keys_cross_the_network_only_encrypted_or_if_allowed(key: str | None) -> None:
    with pytest.raises(OptionError, match="unencrypted"):
        StockOptions("http://gpu-box:8000", key=key)
    assert StockOptions("http://gpu-box:8000", key=key, insecure=True).address == "http://gpu-box:8000"
    assert StockOptions("http://127.0.0.1:8000", key=key).address == "http://127.0.0.1:8000"


COMMANDS = [
    shlex.split(command.replace("\\\n", ""))[1:]
    for block in blocks_of("docs/servers.md")
    for command in commands_of(block)
    if command.startswith("skydraft ")
]
KINDS = {"http://gpu-box:8000/v1": "vllm", "http://localhost:8000/v1": "vllm", "http://localhost:8080": "llama-server",
         "https://api.example/v1": "openai"}  # fmt: skip


def test_the_page_has_commands() -> None:
    assert {command[0] for command in COMMANDS} == {"generate", "doctor", "gateway"}


@pytest.mark.parametrize("command", [each for each in COMMANDS if each[0] != "gateway"], ids=" ".join)
def test_a_command_works(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("secret\n")
    Path("key").chmod(0o600)
    address = next(each for each in command if each in KINDS)
    with fake(KINDS[address]) as server:
        here = [{address: server.url, "MODEL": "toy"}.get(each, each) for each in command]
        assert run([*here, "--edge-model", "toy:drift=0.2"]) == 0
    out, err = capsys.readouterr()
    assert out and "Traceback" not in err and "secret" not in out + err
    assert server.model.num_written or command[0] == "doctor"


PATHS = ("chat/completions", "completions", "responses", "messages")
GATE = {"gate": "entropy:0.3", "k": 2, "hand_back": "0"}
SECRET = "语速，" * 24
COUNTS = ("tokens_in", "tokens_hit", "tokens_out")


def over(address: str, *, owners: int = 1, **how: Any) -> AbstractContextManager[Running]:
    """Whoever gives a key is its owner, if there are several."""
    cloud = skydraft.connect(address, **how)
    return gateway_over(cloud, DRAFT, authorize=str if owners > 1 else None, max_running=3)


def told(running: Running, key: str, content: str = SECRET) -> Any:
    """All that an answer says of the cache."""
    body = plain("chat/completions", content, 4) | {"model": "skydraft-cloud"}
    headers = {"Authorization": f"Bearer {key}"}
    answer = running.client.post(f"{running.v1}/chat/completions", json=body, headers=headers).json()
    stats, receipt = answer["skydraft"]["stats"], answer["skydraft"]["receipt"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, stats["cached_tokens"]["cloud"], stats["tokens_hit"], stats["cost"], receipt["cost"]


@pytest.mark.parametrize("owners", [1, 2])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_key_does_not_learn_what_another_asked(dialect: str, owners: int) -> None:
    knows = dialect in IDS if owners == 1 else dialect == "vllm"  # it keeps them apart, so each may know of its own
    with fake(dialect, TARGET) as server, over(server.url, owners=owners, price="1,10,0") as running:
        told(running, "anna", "速")  # the first text may also ask what the server is
        new = told(running, "anna")
        assert new[:3] == (0, 0, 0) and (owners == 1 or told(running, "bert") == new)
        for key, content in (("bert", SECRET), ("anna", SECRET[:-2] + "速语")):
            again = told(running, key, content)
            assert again[0] > 0 and again[2] > 0 if knows else again == new


@pytest.mark.parametrize("dialect", IDS)
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_usage_is_of_one_prompt_however_often_it_is_sent(dialect: str, path: str) -> None:
    """A gated text sends its prompt with each call; what they cost in all is in the stats."""
    with fake(dialect, TARGET) as server, over(server.url) as running:
        num_prompt = running.post("messages/count_tokens", **plain("messages", SECRET)).json()["input_tokens"]
        for _ in range(2):
            answer = running.post(path, **plain(path, SECRET, 24, model="skydraft-quality", skydraft=GATE)).json()
            usage, stats = answer["usage"], answer.get("skydraft", {}).get("stats")
            cached = usage.get("cache_read_input_tokens", 0)
            num_read = usage.get("prompt_tokens") or usage["input_tokens"] + cached
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            assert 0 <= details.get("cached_tokens", cached) <= num_read == num_prompt
            assert not stats or (stats["num_requests"] > 2 and stats["tokens_in"] > 2 * num_prompt)


def spent(running: Running) -> LinkCost:
    return running.gateway.pair.far.spent  # type: ignore[union-attr]


@pytest.mark.parametrize("path", PATHS[:3])
@pytest.mark.parametrize("is_stock", [True, False])
def test_usage_by_model_is_whole_and_streamed_the_same(path: str, is_stock: bool) -> None:
    """Its tokens are those of the answer, and all usages are what was spent, over a server of ours too."""
    with (
        fake("vllm", TARGET) as stock,
        serving(open_toy("toy")) as server,
        over(stock.url, price="1,2,3") if is_stock else over(server.address) as running,
    ):
        for model in ("skydraft-quality", "skydraft-cloud", "skydraft-edge"):
            before = spent(running)
            body = plain(path, model=model, skydraft=GATE if model == "skydraft-quality" else {})
            whole = running.post(path, **body).json()["skydraft"]
            events = events_of(running.post(path, stream=True, **body).text)
            ours = [each.get("response", each).get("skydraft", {}) for each in events]
            usages = whole["usage"], next(each["usage"] for each in ours if "usage" in each)
            parts = [each[side]["completion_tokens"] for each in usages for side in ("edge", "cloud")]
            assert parts[:2] == parts[2:] and sum(parts[:2]) == len(whole["origins"])
            assert (parts[0] > 0, parts[1] > 0) == (model != "skydraft-cloud", model != "skydraft-edge")
            told = LinkCost(**{name: sum(each["cloud"][name] for each in usages) for name in COUNTS})
            # A text at a server of ours pays when it is closed, which may be a moment after its answer.
            least = before.tokens_out + told.tokens_out
            running.wait_until(lambda least=least: spent(running).tokens_out >= least)
            now = spent(running) - before
            for name in COUNTS:
                more = getattr(now, name) - getattr(told, name)
                assert more >= 0 if is_stock else more == 0
            assert (now.tokens_in > 0 and now.tokens_out > 0) == (model != "skydraft-edge")
            cloud = whole["usage"]["cloud"]
            cost = PRICES.total(cloud["tokens_hit"], cloud["tokens_in"] - cloud["tokens_hit"], cloud["tokens_out"])
            assert whole["usage"]["edge"]["cost"] == 0 and cloud["cost"] == (cost if is_stock else None)
        metrics = running.client.get(f"{running.url}/metrics").text
        assert f'cloud_tokens{{kind="in"}} {float(spent(running).tokens_in)}' in metrics
        assert ("skydraft_gateway_cloud_cost " in metrics) == is_stock


def test_a_gateway_that_has_spent_its_day_goes_on_without_the_cloud() -> None:
    """What needs it is refused."""
    with fake("vllm", TARGET) as server, over(server.url, price="1,2,3", max_cost=2e-5) as running:
        assert running.post("completions", **plain("completions", model="skydraft-cloud")).status_code == 200
        running.wait_until(lambda: spent(running).tokens_out > 0)
        num_asked = len(server.generating)
        for path in PATHS:
            for stream in (False, True):
                reply = running.post(path, **plain(path, model="skydraft-cloud", stream=stream))
                error = reply.json()["error"]
                assert reply.status_code == 429 and "Today's requests have cost" in error["message"]
                assert error["type"] == "rate_limit_error"
                assert error.get("code", "insufficient_quota") == "insufficient_quota"
                assert reply.headers["x-should-retry"] == "false" and 0 < int(reply.headers["retry-after"]) <= 86400
        ours = running.post("completions", **plain("completions")).json()["skydraft"]
        assert ours["receipt"]["calls"] == 0 and ours["usage"]["cloud"]["completion_tokens"] == 0
        events = events_of(running.post("completions", **plain("completions", stream=True)).text)
        notices = [each["skydraft"]["notice"] for each in events if "notice" in each.get("skydraft", {})]
        assert any("max-cost" in line for line in notices) or "edge-fallback" not in ours["origins"]
        assert len(server.generating) == num_asked


# A server that comes up after its gateway and is not the one that was meant: the log says so, not the answers.
UNMEANT: dict[str, tuple[Any, dict[str, str], str]] = {
    "no http": (DRAFT, {}, "does not speak skydraft's protocol"),
    "another model": (DRAFT, {"model": "other"}, "has no model other"),
    "another tokenizer": (thinking_toy(), {}, "as other tokens"),
}


@pytest.mark.parametrize("case", UNMEANT)
def test_what_the_operator_must_mend_is_in_the_log_not_the_answer(case: str, caplog: pytest.LogCaptureFixture) -> None:
    draft, options, says = UNMEANT[case]
    with fake("vllm", TARGET) as server:
        address = server.url.split("/")[2] if case == "no http" else server.url
        cloud = skydraft.connect(address, fallback="start", timeout_s=3, **options)
        with gateway_over(cloud, draft) as running:
            for mode in ("quality", "lossless"):
                caplog.clear()
                answer = running.chat(model=f"skydraft-{mode}")
                assert answer.status_code == 500 and says not in answer.text
                assert [each.levelname for each in caplog.records if says in each.getMessage()] == ["ERROR"]
            health = running.client.get(f"{running.url}/health")
            assert health.json() == {"status": "ok", "cloud": "down" if case == "no http" else "up"}
