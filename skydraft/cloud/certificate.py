"""A check of the certificate and its key: the server refuses at its start a pair that every client would refuse."""

from __future__ import annotations

import ssl
from pathlib import Path

from skydraft.errors import OptionError
from skydraft.files import read_file


def check_certificate(cert: Path, key: Path) -> None:
    """Do a TLS handshake in memory. Raises OptionError if a file is unreadable or expired, or they are no pair."""
    try:
        for each in (cert, key):
            read_file(each)  # not a pipe that nobody writes to
        greeted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        greeted.load_cert_chain(cert, key)
        greeting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        greeting.check_hostname = False
        greeting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # any signer will do; the dates are checked
        greeting.load_verify_locations(cert)
        _shake_hands(greeted, greeting)
    except ssl.SSLError as error:
        reason = (error.reason or "it is not a PEM file").replace("_", " ").lower()
        raise OptionError(
            f"The certificate {cert} and the key {key} cannot be used: {getattr(error, 'verify_message', reason)}.",
            hint="Give two that belong together and are valid now.",
        ) from error
    except OSError as error:
        raise OptionError(
            f"The certificate {cert} or its key {key} cannot be read: {error.strerror}.",
            hint="Check their names and permissions.",
        ) from error


def _shake_hands(greeted: ssl.SSLContext, greeting: ssl.SSLContext) -> None:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [greeting.wrap_bio(back, there, server_side=False), greeted.wrap_bio(there, back, server_side=True)]
    for _ in range(4):  # each side waits for the other a few times
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
