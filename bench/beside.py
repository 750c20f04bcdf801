"""Bytes on the socket, beside another checkout of this repository.

    python -m bench.beside PATH

The toy pair, lossless with k = 5, T = 0 and 0.8: 62 texts of 28 tokens go through a proxy that counts bytes, with TLS
and an access token, over one connection. Each checkout has a server and a client process of its own.
"""

import argparse
import os
import socket
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
    other = parser.parse_args().other.resolve()
    print(machine())
    with TemporaryDirectory() as folder:
        for checkout in (other, HERE):
            print(f"{checkout.name}: {bytes_a_token(checkout, Path(folder))}")


if __name__ == "__main__":
    main()
