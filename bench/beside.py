"""Overhead of a round and bytes on the socket, beside another checkout of this repository, text by text in turns.

    python -m bench.beside PATH [--texts 24] [--only link]
    python -m bench.beside PATH --socket
    python -m bench.beside PATH --pair [--texts 6]

The toy pair, lossless with k = 5, T = 0 and 0.8, in process and over loopback; each checkout has a server and a client
process of its own. Ratios are of the medians of two texts with the same seed; below 1 this checkout is quicker. With
--socket 62 texts of 28 tokens go through a proxy that counts bytes, with TLS and an access token, over one connection.
With --pair the demo pair writes 32 tokens after dev prompts, in one process: ratios of tokens a second, above 1 faster.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.workload import machine

HERE = Path(__file__).parent.parent
TOKEN = "a-token-of-24-characters"
CLIENT = """
import json, statistics, sys
import skydraft
edge, local = skydraft.load("toy:drift=0.2"), skydraft.load("toy")
cloud = skydraft.connect(sys.argv[1])
for line in sys.stdin:
    where, temperature, seed = line.split()
    params = skydraft.DecodingParams(temperature=float(temperature), seed=int(seed), max_new_tokens=300)
    plan, target = skydraft.make_plan("lossless", k=5), cloud if where == "link" else local
    done = skydraft.generate("你好世界", edge=edge, cloud=target, plan=plan, params=params).run()
    overheads = [r.wall_ms - r.draft.forward_ms - r.target.forward_ms for r in done.records[2:]]
    print(json.dumps([statistics.median(overheads), done.stats.bytes_up + done.stats.bytes_down]), flush=True)
"""

COUNTED = """
import sys
import skydraft
from pathlib import Path
edge, ca = skydraft.load("toy:drift=0.2"), Path(sys.argv[2]).read_bytes()
cloud = skydraft.connect(sys.argv[1], token=sys.argv[3], tls_ca=ca, tls_name="localhost")
num_tokens = num_rounds = 0
for number in range(62):
    params = skydraft.DecodingParams(temperature=0.8 * (number % 2), seed=number, max_new_tokens=28)
    prompt, plan = "你好世界" * (1 + number % 3), skydraft.make_plan("lossless", k=5)
    done = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params).run()
    num_tokens, num_rounds = num_tokens + done.stats.num_tokens, num_rounds + done.stats.num_rounds
cloud.close()
print(num_tokens, num_rounds)
"""

PAIR = """
import json, sys
import skydraft
from bench.workload import prompts
from skydraft.models import default_pair
edge, cloud = skydraft.load(default_pair().draft), skydraft.load(default_pair().target)
params = skydraft.DecodingParams(max_new_tokens=32)
for line in sys.stdin:
    mode, number = line.split()
    plan = skydraft.make_plan(mode, k=5 if mode == "lossless" else None)
    done = skydraft.generate(prompts()[int(number)], edge=edge, cloud=cloud, plan=plan, params=params).run()
    print(json.dumps([done.stats.tokens_per_s, done.token_ids]), flush=True)
"""


@contextmanager
def serving(checkout: Path, *options: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(port of a server of this checkout, how processes of it are started)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given: dict[str, Any] = {"env": {**os.environ, "PYTHONPATH": str(checkout)}, "cwd": checkout, "text": True}
    command = [sys.executable, "-m", "skydraft.cli.main", "serve", "--model", "toy", "--port", str(port), *options]
    with subprocess.Popen([*command, "--log-level", "error"], stderr=subprocess.PIPE, **given) as server:
        assert server.stderr is not None
        server.stderr.readline()
        yield port, given
        server.kill()


def pair_speed(other: Path, num_texts: int) -> None:
    """Print the speed of each mode on the demo pair beside that of the other checkout, and whether texts are equal."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    checkouts = [(each, {**os.environ, "PYTHONPATH": str(each)}) for each in (other, HERE)]
    started = [subprocess.Popen([sys.executable, "-c", PAIR], cwd=path, env=env, **pipes) for path, env in checkouts]
    for mode in ("edge", "cloud", "lossless"):
        ratios, num_equal = [], 0
        for number in range(num_texts + 1):
            order = started if number % 2 else started[::-1]
            asked = {each.pid: ask(each, f"{mode} {number}") for each in order}
            (before, texts), (now, text) = (asked[each.pid] for each in started)
            ratios.append(now / before)
            num_equal += texts == text
        ratios = sorted(ratios[1:])  # the first text of a mode reads weights
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"{mode:<9} {statistics.median(ratios):.3f} ({spread}), {num_equal} of {num_texts + 1} texts equal")
    for each in started:
        each.kill()


@contextmanager
def client(checkout: Path) -> Iterator[subprocess.Popen[str]]:
    """A client of a server, both of this checkout, that answers a line with a line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        serving(checkout) as (port, given),
        subprocess.Popen([sys.executable, "-c", CLIENT, f"127.0.0.1:{port}"], **pipes, **given) as asked,
    ):
        yield asked
        asked.kill()


def ask(asked: subprocess.Popen[str], question: str) -> Any:
    """The two values that a client prints for a text."""
    assert asked.stdin is not None and asked.stdout is not None
    asked.stdin.write(question + "\n")
    asked.stdin.flush()
    return json.loads(asked.stdout.readline())


def counting(port: int) -> tuple[int, list[int]]:
    """A proxy to a port of loopback: its own port, and the bytes up and down that went through it so far."""
    listening, counts = socket.create_server(("127.0.0.1", 0)), [0, 0]

    def pump(source: socket.socket, sink: socket.socket, way: int) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                counts[way] += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def accept() -> None:
        while True:
            near, far = listening.accept()[0], socket.create_connection(("127.0.0.1", port))
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=pump, args=(near, far, 0), daemon=True).start()
            threading.Thread(target=pump, args=(far, near, 1), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listening.getsockname()[1], counts


def bytes_a_token(checkout: Path, folder: Path) -> str:
    """What 62 texts send over a socket with TLS."""
    import trustme

    ca = trustme.CA()
    issued = ca.issue_cert("localhost")
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    (folder / "tokens").write_text(f"phone {TOKEN}\n")
    files = {"--tls-cert": "cert.pem", "--tls-key": "key.pem", "--token-file": "tokens"}
    options = [part for name, file in files.items() for part in (name, str(folder / file))]
    with serving(checkout, *options) as (port, given):
        proxy, counts = counting(port)
        command = [sys.executable, "-c", COUNTED, f"127.0.0.1:{proxy}", str(folder / "ca.pem"), TOKEN]
        done = subprocess.run(command, **given, stdout=subprocess.PIPE, check=True)
        num_tokens, num_rounds = map(int, done.stdout.split())
        time.sleep(0.5)  # for the end of the connection
    up, down = (count / num_tokens for count in counts)
    return f"{num_tokens / num_rounds:.2f} tokens a round, bytes a token up {up:.1f}, down {down:.1f}, {up + down:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--only", choices=["local", "link"])
    parser.add_argument("--socket", action="store_true")
    parser.add_argument("--pair", action="store_true")
    given = parser.parse_args()
    print(machine())
    if given.pair:
        pair_speed(given.other.resolve(), given.texts)
        return
    if given.socket:
        with TemporaryDirectory() as folder:
            for checkout in (given.other.resolve(), HERE):
                print(f"{checkout.name}: {bytes_a_token(checkout, Path(folder))}")
        return
    with client(given.other.resolve()) as other, client(HERE) as ours:
        for where in [given.only] if given.only else ["local", "link"]:
            for temperature in (0, 0.8):
                pairs = []
                for number in range(given.texts + 1):
                    question = f"{where} {temperature} {number}"
                    order = (other, ours) if number % 2 else (ours, other)
                    asked = {each.pid: ask(each, question) for each in order}
                    pairs.append((asked[other.pid], asked[ours.pid]))
                pairs = pairs[1:]  # the first text opens the connection
                ratios = [mine[0] / theirs[0] for theirs, mine in pairs]
                low, middle, high = (sorted(ratios)[round(at * (len(ratios) - 1))] for at in (0.1, 0.5, 0.9))
                theirs, mine = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
                print(
                    f"{where:<6} T={temperature:<4} {theirs:.3f} → {mine:.3f} ms a round, ratio {middle:.3f} "
                    f"({low:.2f} to {high:.2f}), bytes of messages {pairs[-1][0][1]} → {pairs[-1][1][1]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
