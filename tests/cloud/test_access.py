"""Who may ask: the file of tokens as it is read and read again, and what each token may use up."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.cloud.access import ANONYMOUS, Keyring, RowBudget
from skydraft.errors import NotAuthorized, OptionError, RateLimited
from tests.toys import law

ANN, BOB = "a" * 16, "Bob!-token+with/signs=="


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"ann {ANN}\nbob\t{BOB}\n")
    path.chmod(0o600)
    return path


def write(path: Path, text: str) -> None:
    """Change a file so that its time changes too, however coarse the clock of the disk is."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def test_without_a_file_everybody_is_anonymous() -> None:
    keyring = Keyring(None)
    assert {keyring.label(given) for given in (None, "", "Bearer x", "nonsense")} == {ANONYMOUS}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_token_is_known_by_its_label(path: Path, scheme: str) -> None:
    keyring = Keyring(path)
    assert keyring.label(f"{scheme} {ANN}") == "ann"
    assert keyring.label(f"{scheme} {BOB}") == "bob"
    assert keyring.label(f"{scheme}  {BOB} ") == "bob"


@pytest.mark.parametrize(
    "given_",
    [
        None, "", "Bearer", "Bearer ", "Bearer  ", ANN, f"Basic {ANN}", f"Bearer{ANN}", f"Bearer {ANN[:-1]}",
        f"Bearer {ANN}a", f"Bearer {ANN.upper()}", "Bearer ann", f"Bearer {ANN} {BOB}", "Bearer 令牌",
        f"Bearer {ANN}\0",
    ],
)  # fmt: skip
def test_anything_else_is_not_let_in_and_not_repeated_in_the_answer(path: Path, given_: str | None) -> None:
    with pytest.raises(NotAuthorized) as raised:
        Keyring(path).label(given_)
    text = str(raised.value)
    assert ANN not in text and BOB not in text and str(path) not in text and "\n" not in text


def test_comments_blank_lines_and_several_tokens_of_one_label_are_fine(path: Path) -> None:
    path.write_text(f"# who\n\n   \nann {ANN}  # her laptop\n  ann   {ANN}2\t\nbob@site.x-1_y {BOB}")
    keyring = Keyring(path)
    assert [keyring.label(f"Bearer {token}") for token in (ANN, ANN + "2", BOB)] == ["ann", "ann", "bob@site.x-1_y"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"ann {ANN}\n{BOB}\n", "Line 2 .*LABEL TOKEN"),
        (f"ann {ANN[:-1]}\n", "Line 1 .*16"),
        (f"# x\n\nann {ANN} {BOB}\n", "Line 3 .*LABEL TOKEN"),
        (f"a/b {ANN}\n", "Line 1 .*LABEL TOKEN"),
        (f"{'x' * 65} {ANN}\n", "Line 1 .*LABEL TOKEN"),
        ("ann 令牌令牌令牌令牌令牌令牌令牌令牌令牌\n", "Line 1 .*LABEL TOKEN"),
        (f"ann {ANN}\nbob {ANN}\n", "Line 2 .*has the same token"),
        ("", "no tokens"),
        ("# nobody yet\n", "no tokens"),
    ],
)
def test_a_wrong_file_is_one_clear_line_that_shows_no_token(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    with pytest.raises(OptionError, match=says) as raised:
        Keyring(path)
    message = str(raised.value)
    assert "\n" not in message and str(path) in message
    assert ANN not in message and BOB not in message


def test_a_file_that_cannot_be_read_is_an_option_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00ann")
    for path in (tmp_path / "missing", tmp_path, binary):
        with pytest.raises(OptionError, match="cannot be read") as raised:
            Keyring(path)
        assert "\n" not in str(raised.value)


def test_a_pipe_is_not_waited_for(path: Path, clock: Clock) -> None:
    keyring = Keyring(path, clock)
    label = keyring.label(f"Bearer {ANN}")
    path.unlink()
    os.mkfifo(path)
    clock.now += 2
    assert keyring.label(f"Bearer {ANN}") == label  # the tokens stay as they were
    with pytest.raises(OptionError, match="it is not a file"):
        Keyring(path)


def test_a_change_is_seen_after_a_second_and_not_looked_for_before(path: Path, clock: Clock) -> None:
    keyring = Keyring(path, clock)
    write(path, f"bob {BOB}\ncarl {'c' * 20}\n")
    clock.now += 0.9
    assert keyring.label(f"Bearer {ANN}") == "ann"
    clock.now += 0.1
    with pytest.raises(NotAuthorized):
        keyring.label(f"Bearer {ANN}")
    assert keyring.label(f"Bearer {'c' * 20}") == "carl"
    assert keyring.label(f"Bearer {BOB}") == "bob"


def test_a_token_that_was_replaced_is_seen_whatever_the_file_says_of_itself(path: Path, clock: Clock) -> None:
    before, keyring = path.stat(), Keyring(path, clock)
    path.write_text(path.read_text().replace(ANN, "c" * 16))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    clock.now += 2
    assert keyring.label(f"Bearer {'c' * 16}") == "ann"
    with pytest.raises(NotAuthorized):
        keyring.label(f"Bearer {ANN}")


def test_taking_out_the_last_token_lets_nobody_in(path: Path, clock: Clock) -> None:
    keyring = Keyring(path, clock)
    write(path, "# nobody\n")
    clock.now += 5
    with pytest.raises(NotAuthorized):
        keyring.label(f"Bearer {ANN}")


@pytest.mark.parametrize("text", ["ann short\n", "\0", None])
def test_a_file_that_breaks_later_changes_nothing_is_logged_once_and_may_be_mended(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    keyring = Keyring(path, clock)
    if text is None:
        path.unlink()
    else:
        write(path, text)
    with caplog.at_level(logging.INFO, "skydraft.cloud"):
        for _ in range(3):
            clock.now += 5
            assert keyring.label(f"Bearer {ANN}") == "ann"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert ANN not in caplog.text and BOB not in caplog.text
    write(path, f"bob {BOB}\n")
    os.utime(path)
    clock.now += 1
    assert keyring.label(f"Bearer {BOB}") == "bob"
    with pytest.raises(NotAuthorized):
        keyring.label(f"Bearer {ANN}")


def refused_for(budget: RowBudget, label: str, num_rows: int) -> float:
    """Spend; returns how long to wait if refused, 0 if not."""
    try:
        budget.spend(label, num_rows)
    except RateLimited as error:
        assert error.retry_after_s > 0 and "\n" not in str(error)
        return error.retry_after_s
    return 0.0


def test_rate_0_is_no_limit(clock: Clock) -> None:
    budget = RowBudget(0, clock)
    assert all(not refused_for(budget, "ann", 10**6) for _ in range(100))


def test_a_full_bucket_holds_two_seconds_and_goes_below_zero_once(clock: Clock) -> None:
    budget = RowBudget(100, clock)
    assert not refused_for(budget, "ann", 199)
    assert not refused_for(budget, "ann", 51)  # one row was left: down to -50
    assert refused_for(budget, "ann", 1) == pytest.approx(0.51)
    clock.now += 0.49
    assert refused_for(budget, "ann", 1) == pytest.approx(0.02)
    clock.now += 0.02
    assert not refused_for(budget, "ann", 1)


def test_a_low_rate_still_lets_a_whole_block_through(clock: Clock) -> None:
    budget = RowBudget(2, clock)
    assert not refused_for(budget, "ann", 33)
    assert not refused_for(budget, "ann", 30)
    assert not refused_for(budget, "ann", 1)
    assert refused_for(budget, "ann", 1) == pytest.approx(0.5)


def test_each_label_has_a_bucket_of_its_own_that_never_overflows(clock: Clock) -> None:
    budget = RowBudget(100, clock)
    assert not refused_for(budget, "ann", 500)
    assert refused_for(budget, "ann", 1)
    assert not refused_for(budget, "bob", 200)
    clock.now += 3600
    assert not refused_for(budget, "ann", 200)
    assert refused_for(budget, "ann", 1)


def test_what_is_charged_is_taken_whatever_is_there_and_says_how_long_to_wait(clock: Clock) -> None:
    budget = RowBudget(100, clock)
    assert budget.charge("ann", 199) == 0
    assert budget.charge("ann", 51) == pytest.approx(0.51)
    assert budget.charge("ann", 50) == pytest.approx(1.01)  # never refused, and remembered
    assert refused_for(budget, "ann", 1) == pytest.approx(1.01)


@law(50)
@given(
    st.sampled_from([1.0, 30.0, 500.0]),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 300)), min_size=1, max_size=40),
)
def test_what_gets_through_is_the_rate_and_a_burst_and_who_waits_as_told_gets_through(
    rate: float, requests: list[tuple[float, int]]
) -> None:
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
