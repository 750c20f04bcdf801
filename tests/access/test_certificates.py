"""New connections get a renewed certificate; a pair that cannot be used keeps the one before."""

import ssl
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme

from skydraft.engines.toy import open_toy
from skydraft.files import write_whole
from skydraft.gateway.server import Entrance, ListenOptions, listen, server_of

from ..serving import serving


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_a_new_certificate_waits_for_its_key(command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    issued = [trustme.CA().issue_cert("127.0.0.1") for _ in range(2)]
    certs = [pair.cert_chain_pems[0].bytes() for pair in issued]
    keys = [pair.private_key_pem.bytes() for pair in issued]
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    write_whole(cert, certs[0])
    write_whole(key, keys[0], 0o600)
    with ExitStack() as stack:
        if command == "serve":
            server = stack.enter_context(serving(open_toy("toy"), tls_cert=cert, tls_key=key))
            port = int(server.address.rpartition(":")[2])
        else:
            listening = stack.enter_context(listen(ListenOptions()))
            gateway, port = server_of(Entrance(), ListenOptions(tls_cert=cert, tls_key=key)), listening.getsockname()[1]
            (thread := threading.Thread(target=gateway.run, args=([listening],), daemon=True)).start()
            stack.callback(thread.join)
            stack.callback(setattr, gateway, "should_exit", True)

        def shown() -> list[bytes]:
            return [ssl.get_server_certificate(("127.0.0.1", port)).encode() for _ in range(2)]

        assert shown() == [certs[0]] * 2 and not caplog.messages
        write_whole(cert, certs[1])
        assert shown() == [certs[0]] * 2
        assert [line.partition(":")[0] for line in caplog.messages] == ["certificate kept as it was"]
        write_whole(key, keys[1], 0o600)
        assert shown() == [certs[1]] * 2
        cert.unlink()
        assert shown() == [certs[1]] * 2 and len(caplog.messages) == 2
