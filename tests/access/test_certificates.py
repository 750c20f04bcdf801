"""New connections get a renewed certificate; a pair that cannot be used keeps the one before."""

import os
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import trustme

from skydraft.engines.toy import open_toy
from skydraft.gateway.server import Entrance, ListenOptions, listen, server_of

from ..serving import serving


@contextmanager
def cloud(cert: Path, key: Path) -> Iterator[int]:
    with serving(open_toy("toy"), tls_cert=cert, tls_key=key) as server:
        yield int(server.address.rpartition(":")[2])


@contextmanager
def gateway(cert: Path, key: Path) -> Iterator[int]:
    options = ListenOptions(tls_cert=cert, tls_key=key)
    server = server_of(Entrance(), options)
    with listen(options) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("serve", [cloud, gateway])
def test_a_renewed_certificate_is_shown_once_its_key_is_there_too(
    serve: Callable[[Path, Path], AbstractContextManager[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = [trustme.CA().issue_cert("127.0.0.1") for _ in range(2)]
    certs = [pair.cert_chain_pems[0].bytes() for pair in pairs]
    keys = [pair.private_key_pem.bytes() for pair in pairs]
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(path: Path, data: bytes) -> None:
        (new := tmp_path / "new").write_bytes(data)
        new.chmod(0o600)
        os.replace(new, path)

    put(cert, certs[0])
    put(key, keys[0])
    with serve(cert, key) as port:

        def shown() -> bytes:
            return ssl.get_server_certificate(("127.0.0.1", port)).encode()

        assert [shown(), shown()] == [certs[0]] * 2 and not caplog.records
        put(cert, certs[1])
        assert [shown(), shown()] == [certs[0]] * 2
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["certificate kept as it was"]
        put(key, keys[1])
        assert [shown(), shown()] == [certs[1]] * 2
        cert.unlink()
        assert shown() == certs[1] and len(caplog.records) == 2
