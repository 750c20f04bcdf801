"""What each key of a gateway has spent, and may spend in a day: nothing of the sum is lost between keys, or doubled."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import skydraft
from skydraft.access.keys import Keyring
from skydraft.edge.budget import DaySum
from skydraft.engines.toy import open_toy
from skydraft.gateway.pair import Pair
from skydraft.types import LinkCost
from tests.gateway.interfaces import events_of, plain
from tests.gateway.running import Running, gateway
from tests.hostile.texts import DRAFT, TARGET
from tests.serving import serving
from tests.stock.fakes import Fake
from tests.stock.test_money import PRICES, standing

NAMES = {"anna": "语速", "bert": "音调高", "carl": "今天"}
FATES = ["", "", "", "500", "503", "hangs up", "cut 90", "cut 700"]
PATHS = ("chat/completions", "completions", "responses", "messages")


@contextmanager
def keyed(address: str, keys: Path, **how: Any) -> Iterator[Running]:
    ring = Keyring(keys, has_prices="price" in how)
    with (
        closing(skydraft.connect(address, max_cost_of=ring.max_cost, **how)) as cloud,
        gateway(Pair(DRAFT, cloud), authorize=ring.label, max_running=3) as running,
    ):
        yield running


def key_file(tmp_path: Path, **budgets: str) -> Path:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {name * 5} {budgets.get(name, '')}\n" for name in NAMES))
    path.chmod(0o600)
    return path


def post(running: Running, name: str, path: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {name * 5}"}
    return httpx.post(f"{running.v1}/{path}", json=plain(path, NAMES[name]) | body, headers=headers, timeout=30.0)


def hang_up(running: Running, name: str) -> None:
    body = plain("chat/completions", NAMES[name], 200) | {"stream": True, "model": "skydraft-cloud"}
    headers = {"Authorization": f"Bearer {name * 5}"}
    with httpx.stream("POST", f"{running.v1}/chat/completions", json=body, headers=headers, timeout=30.0) as reply:
        for _ in zip(range(2), reply.iter_lines(), strict=False):
            pass


def spent(running: Running) -> dict[str, LinkCost]:
    found: dict[str, LinkCost] = running.gateway.pair.far.servers.all[0].budget.spent  # type: ignore[union-attr]
    return found


def sums(home: Path) -> tuple[float, dict[str, float]]:
    kept = json.loads((home / "spent.json").read_text())
    (total,), (owners,) = kept["costs"].values(), kept["owners"].values()
    return total, owners


def flood(running: Running, seed: int) -> None:
    """Answers of all keys at once, by all interfaces, whole, streamed and broken off."""
    rng = random.Random(seed)
    with ThreadPoolExecutor(6) as pool:
        for number in range(12):
            name, stream = list(NAMES)[number % 3], rng.random() < 0.5
            body = {"model": rng.choice(["skydraft-quality", "skydraft-lossless"]), "stream": stream}
            if rng.random() < 0.2:
                pool.submit(hang_up, running, name)
            else:
                pool.submit(post, running, name, rng.choice(PATHS), **body)
    running.wait_until_idle()


def is_of(given: Any, name: str) -> bool:
    ids = list(TARGET.vocab.encode(NAMES[name]))
    return any(given[at : at + len(ids)] == ids for at in range(len(given)))


def test_the_sum_over_keys_is_all_that_was_spent(tmp_path: Path) -> None:
    """With errors, retries, clients that hang up, and restarts; and no key's part is less than what came for it."""
    keys, posts, tokens = key_file(tmp_path), list[Any](), LinkCost()
    with standing("vllm", tmp_path) as front:
        for seed in range(2):
            with keyed(front.url, keys, price="1,2,3", timeout_s=5.0) as running:
                random.Random(seed).shuffle(fates := FATES * 2)
                front.fates += fates
                flood(running, seed)
            assert spent(running).keys() <= {*NAMES, ""}
            tokens = sum(spent(running).values(), tokens)
            Fake.wait_until(lambda: not front.num_open)
        posts = list(front.generating)
    total, owners = sums(tmp_path)
    assert owners.keys() == NAMES.keys() and total == pytest.approx(sum(owners.values()))
    assert tokens.tokens_in >= sum(len(each.prompt) for each in posts)
    for name, cost in owners.items():
        own = [each for each in posts if is_of(each.prompt, name)]
        least = sum(PRICES.total(each.num_cached, len(each.prompt) - each.num_cached, 0) for each in own)
        assert own and cost + 1e-12 >= least


def spent_since(running: Running, before: LinkCost, num_out: int) -> LinkCost:
    """A text at a server of ours pays when it is closed, which may be a moment after its answer."""
    running.wait_until(lambda: spent(running).get("anna", before).tokens_out >= before.tokens_out + num_out)
    return spent(running).get("anna", LinkCost()) - before


@pytest.mark.parametrize("path", PATHS[:3])
def test_usage_by_model_is_whole_and_streamed_the_same(path: str, tmp_path: Path) -> None:
    """Its tokens are those of the answer, and all usages of a key are what it has spent, over a server of ours too."""
    keys = key_file(tmp_path)
    with standing("vllm", tmp_path) as front, serving(open_toy("toy")) as server:
        for address, how in ((front.url, {"price": "1,2,3"}), (server.address, {})):
            with keyed(address, keys, **how) as running:
                for model in ("skydraft-quality", "skydraft-cloud", "skydraft-edge"):
                    before, gate = (
                        spent(running).get("anna", LinkCost()),
                        {"gate": "entropy:0.3", "k": 2, "hand_back": "0"},
                    )
                    body = {"model": model, "skydraft": gate if model == "skydraft-quality" else {}}
                    whole = post(running, "anna", path, **body).json()
                    events = events_of(post(running, "anna", path, stream=True, **body).text)
                    last = next(
                        ours["usage"] for each in events
                        if "usage" in (ours := each.get("response", each).get("skydraft", {}))
                    )  # fmt: skip
                    ours, num = whole["skydraft"]["usage"], len(whole["skydraft"]["origins"])
                    parts = [each[side]["completion_tokens"] for each in (ours, last) for side in ("edge", "cloud")]
                    assert parts[:2] == parts[2:] and sum(parts[:2]) == num
                    assert (parts[0] > 0, parts[1] > 0) == (model != "skydraft-cloud", model != "skydraft-edge")
                    num_out = 0 if how else ours["cloud"]["tokens_out"] + last["cloud"]["tokens_out"]
                    now = spent_since(running, before, num_out)
                    for name in ("tokens_in", "tokens_hit", "tokens_out"):
                        told = ours["cloud"][name] + last["cloud"][name]
                        assert told == getattr(now, name) or (how and told <= getattr(now, name))
                    assert (now.tokens_in > 0 and now.tokens_out > 0) == (model != "skydraft-edge")
                    if how:
                        cloud = ours["cloud"]
                        read = cloud["tokens_in"] - cloud["tokens_hit"]
                        assert cloud["cost"] == PRICES.total(cloud["tokens_hit"], read, cloud["tokens_out"])
                    assert ours["edge"]["cost"] == 0 and (ours["cloud"]["cost"] is None) == (not how)
                metrics = httpx.get(f"{running.url}/metrics", headers={"x-api-key": "anna" * 5}).text
                assert f'cloud_tokens{{kind="in"}} {float(spent(running)["anna"].tokens_in)}' in metrics
                assert ("skydraft_gateway_cloud_cost " in metrics) == bool(how) and "anna" not in metrics


KINDS = {
    "chat/completions": lambda body: (body["error"]["type"], body["error"]["code"]),
    "completions": lambda body: (body["error"]["type"], body["error"]["code"]),
    "responses": lambda body: (body["error"]["type"], body["error"]["code"]),
    "messages": lambda body: (body["error"]["type"], body["type"]),
}


@pytest.mark.parametrize("budget", ["0", "0.00002"])
def test_a_key_that_has_spent_its_budget_goes_on_without_the_cloud(budget: str, tmp_path: Path) -> None:
    """What needs it is refused, after a restart too; other keys have theirs."""
    keys = key_file(tmp_path, anna=f"max-cost={budget}", bert="max-cost=5")
    with standing("vllm", tmp_path) as front:
        for is_again in (False, True):
            with keyed(front.url, keys, price="1,2,3") as running:
                num_before = len(front.generating)
                is_spent = budget == "0" or is_again
                for _ in range(0 if is_spent else 30):
                    if is_spent := post(running, "anna", "completions").status_code == 429:
                        break
                assert is_spent
                num_asked = len(front.generating)
                assert (num_asked > num_before) == (budget != "0" and not is_again)
                for path in PATHS:
                    for stream in (False, True):
                        reply = post(running, "anna", path, stream=stream)
                        assert (
                            reply.status_code == 429
                            and "anna has spent its max-cost" in reply.json()["error"]["message"]
                        )
                        kind = "error" if path == "messages" else "insufficient_quota"
                        assert KINDS[path](reply.json()) == ("rate_limit_error", kind)
                        assert (
                            reply.headers["x-should-retry"] == "false"
                            and 0 < int(reply.headers["retry-after"]) <= 86400
                        )
                ours = post(running, "anna", "completions", model="skydraft-quality").json()["skydraft"]
                assert ours["receipt"]["calls"] == 0 and ours["usage"]["cloud"]["completion_tokens"] == 0
                events = events_of(post(running, "anna", "completions", model="skydraft-quality", stream=True).text)
                notices = [each["skydraft"]["notice"] for each in events if "notice" in each.get("skydraft", {})]
                assert any("max-cost" in line for line in notices) or "edge-fallback" not in ours["origins"]
                assert len(front.generating) == num_asked
                for name in ("bert", "carl"):
                    assert post(running, name, "completions").status_code == 200
        assert "anna" in sums(tmp_path)[1] or budget == "0"


def test_many_processes_add_up_for_each_key(tmp_path: Path) -> None:
    def add(number: int) -> None:
        with suppress(OSError):
            DaySum(tmp_path / "spent.json", "it").add(7, {("anna", "bert")[number % 2]: 0.25})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(80)))
    assert sums(tmp_path) == (20.0, {"anna": 10.0, "bert": 10.0})
    assert DaySum(tmp_path / "spent.json", "another").add(7, {"": 1.0}) == (7, {"": 1.0})
