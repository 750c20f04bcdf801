"""What leaves this device: with --local-only not one byte, by the counters of the only network device.

Requests run in a network namespace of their own, whose only way out is watched: `python -m tests.test_leaving` runs
inside. All that this process and its children send to another machine goes through one device, which counts each byte:
also what gRPC's C code, a resolver or a program sends. No connection comes about, but each try is counted.
"""

import io
import json
import os
import subprocess
import sys
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import skydraft
from skydraft import make_plan
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError

from .serving import free_port

DEVICE, AWAY = "out0", "10.77.0.2:7373"
_SETUP = f"""set -e
ip link set lo up
ip link add {DEVICE} type veth peer name out1
for end in {DEVICE} out1; do ip link set $end addrgenmode none multicast off up; done
ip addr add 10.77.0.1/24 dev {DEVICE}
ip route add default via 10.77.0.254
exec "$@"
"""
LOCAL = ["--local-only", "--edge-model", "toy:drift=0.2", "--cloud-model", "toy"]
MODES = ("edge", "cloud", "lossless", "fluency", "quality", "answers")


def watched(*command: str) -> subprocess.CompletedProcess[str]:
    setup = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", _SETUP, "bash"]
    return subprocess.run([*setup, *command], capture_output=True, text=True, check=False, timeout=300)


def num_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{DEVICE}:"))


def typed(*args: str, stdin: str = "") -> int:
    from skydraft.cli.main import run

    with patch("sys.stdin", io.StringIO(stdin)), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return run(args)


def commands(folder: Path) -> dict[str, int]:
    """Commands with --local-only, and then one without."""
    for number in range(24):
        options = ["-n", "6", "--seed", str(number), "-m", MODES[number % len(MODES)], *("--json",) * (number % 2)]
        assert typed("generate", f"语速{number}", *LOCAL, *options) == 0
    questions = "".join(f"问{number}\n" for number in range(12))
    assert typed("chat", *LOCAL, "-n", "4", stdin=questions) == 0
    prompts = folder / "prompts.txt"
    prompts.write_text("语速\n情绪\n", encoding="utf-8")
    compared = ["--modes", "edge,lossless", "-n", "4", "--no-scores", "--out", str(folder / "out")]
    assert typed("compare", "--prompts", str(prompts), *compared, *LOCAL) == 0
    for refused in (
        ["generate", "快", "--local-only", "--cloud", AWAY], ["generate", "快", "--local-only", "--edge-model", "a/b"],
        ["chat", "--local-only", "--cloud", "http://10.77.0.2:8000/v1"], ["gateway", "--local-only", "--cloud", AWAY],
        ["compare", "--prompts", str(prompts), "--emulate-rtt", "10", *LOCAL],
    ):  # fmt: skip
        assert typed(*refused) != 0, refused
    left = num_bytes()
    typed("generate", "快", "--edge-model", "toy", "--cloud", AWAY, "--insecure", "--cloud-timeout", "0.5")
    return {"left": left, "control": num_bytes() - left}


def asked_for(number: int) -> tuple[str, dict[str, Any]]:
    """A request of a gateway's client: path and body."""
    chat = {"model": "skydraft", "messages": [{"role": "user", "content": f"语速{number}"}], "max_tokens": 4}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    kinds: list[dict[str, Any]] = [
        {}, {"stream": True}, {"model": "skydraft-quality"}, {"model": "skydraft-fluency", "stream": True}, {"n": 3},
        {"model": "skydraft-edge", "temperature": 0.9, "seed": number}, {"stop": ["。"], "logit_bias": {"3": -5}},
        {"model": "skydraft-lossless"}, {"tools": [tool]}, {"response_format": {"type": "json_object"}},
        {"prompt": ["一", "二"], "stream": True}, {"skydraft": {"gate": "entropy:0.5", "k": 3}}, {"logprobs": True},
        {"skydraft": {"mode": "cloud"}}, {"messages": [{"role": "nobody", "content": ""}]}, {"path": "messages"},
        {"path": "responses", "input": "语速", "max_output_tokens": 4, "stream": True},
        {"path": "messages", "stream": True}, {"path": "responses/input_tokens", "input": "语速"},
        {"path": "messages/count_tokens"}, {"prompt": "从前", "echo": True, "logprobs": 0, "max_tokens": 0},
    ]  # fmt: skip
    body = chat | kinds[number % len(kinds)]
    body["skydraft"] = body.get("skydraft", {}) | {"local_only": True}
    return body.pop("path", "completions" if "prompt" in body else "chat/completions"), body


def requests(num: int) -> dict[str, int]:
    """Requests with `local_only` at a gateway with a cloud, and then one without."""
    import httpx2 as httpx

    from .gateway.running import over

    statuses: list[int] = []
    cloud = skydraft.connect(AWAY, insecure=True, timeout_s=0.5)
    with over(cloud) as running, httpx.Client(timeout=30) as client:
        for number in range(num):
            path, body = asked_for(number)
            answer = client.post(f"{running.v1}/{path}", json=body)
            statuses.append(answer.status_code)
            if answer.status_code == 200 and (ours := {} if body.get("stream") else answer.json().get("skydraft")):
                assert set(ours["origins"]) <= {"edge"} and not ours["receipt"]["prompt_tokens"], ours
            assert answer.status_code in (200, 400), answer.text
        left = num_bytes()
        client.post(f"{running.v1}/chat/completions", json=asked_for(7)[1] | {"skydraft": {}})
    told = {"answers": statuses.count(200), "refusals": statuses.count(400)}
    return told | {"left": left, "control": num_bytes() - left}


_CAN_WATCH = os.name == "posix" and not watched("true").returncode


@pytest.mark.skipif(not _CAN_WATCH, reason="no network namespaces here")
@pytest.mark.parametrize("what", ["requests", "commands"])
def test_no_byte_leaves(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In hundreds of requests of all kinds at a gateway whose cloud is elsewhere, and from commands."""
    monkeypatch.setenv("SKYDRAFT_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    done = watched(sys.executable, "-m", "tests.test_leaving", what, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["left"] == 0 and said["control"] > 0  # what may leave does
    assert said.get("answers", 201) > 200 and said.get("refusals", 21) > 20


def test_a_local_model_takes_no_server() -> None:
    with closing(skydraft.connect(f"127.0.0.1:{free_port()}")) as cloud:
        edge = skydraft.load("toy", local_only=True)
        with pytest.raises(OptionError, match="must stay on this device"):
            skydraft.generate("快", edge=edge, cloud=cloud, plan=make_plan("lossless"))
        with pytest.raises(OptionError, match="must stay on this device"):
            skydraft.generate("快", edge=open_toy("toy"), cloud=cloud, plan=make_plan("cloud"), local_only=True)
        assert skydraft.generate("快", edge=edge, cloud=open_toy("toy")).run().text
        alone = skydraft.generate("快", edge=edge, cloud=cloud, plan=make_plan("edge")).run()
        assert set(alone.origins) == {"edge"} and alone.target is None


if __name__ == "__main__":
    print(json.dumps(requests(315) if sys.argv[1] == "requests" else commands(Path(sys.argv[2]))))
