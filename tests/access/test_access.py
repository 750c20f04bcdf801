"""Who may ask: the file of tokens as it is read and read again; what each token may use up, and limits that nobody
could keep; certificates that are renewed.
"""

import os
import ssl
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from skydraft.access.keys import ANONYMOUS, Keyring
from skydraft.access.limits import Limits, RowBudget
from skydraft.engines.toy import open_toy
from skydraft.errors import NotAuthorized, OptionError, RateLimited
from skydraft.files import write_whole
from skydraft.gateway.server import Entrance, ListenOptions, listen, server_of
from tests.toys import law

from ..serving import serving

ANN, BOB, CARL = "a" * 16, "Bob!-token+with/signs==", "c" * 16


class Clock:
    """Seconds that pass only when told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# who\n\n   \nann {ANN}  # her laptop\n  ann   {ANN}2\t\nbob@site.x-1_y\t{BOB}")
    path.chmod(0o600)
    return path


def known(keyring: Keyring) -> set[str]:
    """The labels of those of these three tokens that it knows."""
    found = set[str]()
    for token in (ANN, BOB, CARL):
        with suppress(NotAuthorized):
            found.add(keyring.label(f"Bearer {token}"))
    return found


def refused_for(budget: RowBudget, label: str, num_rows: int) -> float:
    """Spend; returns how long to wait if refused, 0 if not."""
    try:
        budget.spend(label, num_rows)
    except RateLimited as error:
        assert error.retry_after_s > 0 and "\n" not in str(error)
        return error.retry_after_s
    return 0.0


@pytest.mark.parametrize(("given", "label"), [
    (f"Bearer {ANN}", "ann"), (f"Bearer {ANN}2", "ann"), (f"bearer {ANN}", "ann"),
    (f"BEARER  {BOB} ", "bob@site.x-1_y"),
    *((given, None) for given in (
        None, "", "Bearer", "Bearer ", "Bearer  ", ANN, f"Basic {ANN}", f"Bearer{ANN}", f"Bearer {ANN[:-1]}",
        f"Bearer {ANN}a", f"Bearer {ANN.upper()}", "Bearer ann", f"Bearer {ANN} {BOB}", "Bearer 令牌",
        f"Bearer {ANN}\0",
    )),
])  # fmt: skip
def test_a_token_is_known_by_its_label_and_nothing_else_is_let_in(path: Path, given: str | None, label: str) -> None:
    assert Keyring(None).label(given) == ANONYMOUS
    if label:
        assert Keyring(path).label(given) == label
        return
    with pytest.raises(NotAuthorized) as raised:
        Keyring(path).label(given)
    assert not any(each in str(raised.value) for each in (ANN, BOB, str(path), "\n"))


@pytest.mark.parametrize(("text", "says"), [
    (f"ann {ANN}\n{BOB}\n", "Line 2 .*LABEL TOKEN"), (f"ann {ANN[:-1]}\n", "Line 1 .*16"),
    (f"# x\n\nann {ANN} {BOB}\n", "Line 3 .*LABEL TOKEN"), (f"a/b {ANN}\n", "Line 1 .*LABEL TOKEN"),
    (f"{'x' * 65} {ANN}\n", "Line 1 .*LABEL TOKEN"), (f"ann {'令牌' * 9}\n", "Line 1 .*LABEL TOKEN"),
    (f"ann {ANN}\nbob {ANN}\n", "Line 2 .*token of its own"), ("", "no tokens"), ("# nobody yet\n", "no tokens"),
    ("\udcff\udcfe", "cannot be read: it is not UTF-8"), (None, "cannot be read"), ("a pipe", "it is not a file"),
])  # fmt: skip
def test_a_wrong_file_is_one_clear_line_that_shows_no_token_and_later_it_changes_nothing(
    path: Path, text: str | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    keyring, is_empty = Keyring(path, clock := Clock()), says == "no tokens"
    path.unlink()
    if text == "a pipe":
        os.mkfifo(path)
    elif text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(OptionError, match=says) as raised:
        Keyring(path)
    for _ in range(3):
        clock.now += 5
        assert known(keyring) == (set() if is_empty else {"ann", "bob@site.x-1_y"})
    assert [record.levelname for record in caplog.records] == ["ERROR"] * (not is_empty)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    assert not any(token in str(raised.value) + caplog.text for token in (ANN, BOB))
    path.unlink(missing_ok=True)
    path.write_text(f"bob {BOB}\n")
    clock.now += 1
    assert known(keyring) == {"bob"}


def test_a_change_is_seen_after_a_second_whatever_the_file_says_of_itself(path: Path) -> None:
    path.write_text(f"ann {ANN}\nann {BOB}\n")
    before, keyring = path.stat(), Keyring(path, clock := Clock())
    path.write_text(f"bob {BOB}\nann {CARL}\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    clock.now += 0.9
    assert known(keyring) == {"ann"} and not keyring.has_several()
    clock.now += 0.1
    assert known(keyring) == {"ann", "bob"} and keyring.has_several()
    path.write_text("# nobody\n")
    clock.now += 5
    assert not known(keyring) and keyring.has_several()  # their texts are still in a cache


def test_each_label_has_a_bucket_which_never_overflows_and_rate_0_is_no_limit() -> None:
    budget, without = RowBudget(100, clock := Clock()), RowBudget(0, clock)
    for pause_s, label, num_rows, refused_s in (
        (0, "ann", 500, 0), (0, "ann", 1, 3.01), (0, "bob", 200, 0), (3600, "ann", 200, 0), (0, "ann", 1, 0.01)
    ):  # fmt: skip
        clock.now += pause_s
        assert refused_for(budget, label, num_rows) == pytest.approx(refused_s)
        assert not refused_for(without, label, 10**6)


pauses = st.tuples(st.floats(0, 3), st.integers(1, 300))


@law(50)
@given(st.sampled_from([1.0, 30.0, 500.0]), st.lists(pauses, min_size=1, max_size=40))
def test_the_rate_and_a_burst_get_through_as_does_who_waits(rate: float, requests: list[tuple[float, int]]) -> None:
    clock = Clock()
    budget, began, spent = RowBudget(rate, clock), clock.now, 0
    for pause, num_rows in requests:
        clock.now += pause
        allowed = max(2 * rate, 64) + rate * (clock.now - began)
        if wait := refused_for(budget, "ann", num_rows):
            assert wait <= 301 / rate  # one request below zero at most
            clock.now += wait
            assert not refused_for(budget, "ann", num_rows)
        else:
            assert spent < allowed + 1e-6  # before this one something was left
        spent += num_rows


@pytest.mark.parametrize("name", ["max_sessions", "max_prompt", "max_queue", "session_ttl_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_that_nobody_could_keep_are_refused_by_the_name_of_their_option(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=name) as raised:
        Limits(**{name: value})  # type: ignore[arg-type]
    assert "--" + name.removesuffix("_s").replace("_", "-") in raised.value.line


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_a_new_certificate_waits_for_its_key(command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New connections get the renewed one; a pair that cannot be used keeps the one before."""
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
