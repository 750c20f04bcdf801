"""Bytes a generated token: the recorded rounds of a comparison once more, through the codec and over sockets. No model.

    python -m bench.payload [RECORDS] [--mode "lossless;k=5"] [--socket]

Sums VerifyRequest and VerifyReply of the mode's generations in process, openings included, with the recorded costs and
a queue of 0.1 ms; in a stream, where the session is named once, and in calls. With --socket the same messages go
through gRPC on loopback, as the edge sends them, one connection for all, with a token: in plaintext, to count frames by
kind, and with TLS, to count all. The server there has no model: it answers with the recorded verdicts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from bench.cloud import certificates
from bench.frames import Recorder, answering
from skydraft.edge.link import Link, LinkOptions
from skydraft.evaluation.emulated_link import EmulatedLink
from skydraft.evaluation.records import GenerationLine, read_records
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import Opened, Opening, SessionCall, TargetId, VerifyCall
from skydraft.types import Cost, Prompt, Verdict

RECORDS = Path(__file__).parent.parent / "docs" / "report-zh-dev" / "records.jsonl"
_SESSION, _DIGEST, _TYPICAL_ID = 2_000_000, 0xDEADBEEF, 100_000
_TARGET = TargetId("01234567", 4096)
_PATIENCE_S = 30.0
TOKEN = "a-token-of-24-characters"


def opening(line: GenerationLine) -> Opening:
    """How the session of a generation begins."""
    return Opening("0" * 16, Prompt((_TYPICAL_ID,) * line.num_prompt_tokens))


def rounds(line: GenerationLine) -> Iterator[tuple[VerifyCall, Verdict]]:
    """What was asked and answered, as far as the records say; the session is open already."""
    for entry in line.rounds:
        record = entry.record
        is_last = record.base + record.num_committed == len(line.token_ids)
        own = line.token_ids[record.base + record.num_accepted :][: record.num_committed - record.num_accepted]
        target = record.target
        cost = Cost(target.num_passes, target.num_rows, target.forward_ms, target.prefill_ms, queue_ms=0.1)
        token_id, finish = own[0] if own else None, line.finish if is_last else None
        yield (
            VerifyCall(_SESSION, 0, record.base, (), entry.draft_ids, _DIGEST),
            Verdict(record.base, record.num_accepted, token_id, finish, cost=cost),
        )


def message_bytes(line: GenerationLine, *, in_stream: bool) -> tuple[int, int]:
    """(bytes up, bytes down) of the messages of one generation, its opening in the first of them."""
    up = down = 0
    for number, (call, verdict) in enumerate(rounds(line)):
        session = 0 if in_stream and number else _SESSION
        start = None if number else opening(line)
        asked = VerifyCall(session, 0, call.base, (), call.draft_ids, _DIGEST, start)
        up += len(codec.encode_verify_call(asked))
        down += len(codec.encode_verdict(verdict))
    return up, down


def replay(link: Link, lines: list[GenerationLine], replies: deque[bytes]) -> None:
    """Ask everything again, as the edge does with a session that is opened ahead."""
    for line in lines:
        start = SessionCall(_SESSION, 0, opening(line))
        if link.has_sessions:
            replies.append(codec.encode_opened(Opened(0), _TARGET, pb.VerifyReply))
            stream = link.session()
            stream.send(codec.encode_streamed_open(start))
            stream.receive(_PATIENCE_S, _PATIENCE_S)
        else:
            replies.append(codec.encode_opened(Opened(0), _TARGET))
            link.call("Open", codec.encode_session_call(start), _PATIENCE_S)
        for call, verdict in rounds(line):
            replies.append(codec.encode_verdict(verdict))
            if link.has_sessions:
                named = VerifyCall(0, 0, call.base, (), call.draft_ids, _DIGEST)
                stream.send(codec.encode_verify_call(named))
                stream.receive(_PATIENCE_S, _PATIENCE_S)
            else:
                link.call("Verify", codec.encode_verify_call(call), _PATIENCE_S)
        if not link.has_sessions:
            replies.append(b"")
            link.call("Close", codec.encode_close(_SESSION), _PATIENCE_S)
        elif not stream.close():
            raise SystemExit("a stream broke")
    link.close()


def on_the_socket(lines: list[GenerationLine], num_tokens: int) -> None:
    """Bytes a token by kind of frame in plaintext, and all of them with TLS, of both ways to ask."""
    print(f"\non the socket, {len(lines)} texts over one connection with a token, bytes a token")
    with tempfile.TemporaryDirectory() as folder:
        ca, files = certificates(Path(folder))
        for name, unary in (("a stream", False), ("unary calls", True)):
            with answering() as (port, replies), Recorder(port) as recorder:
                replay(Link(LinkOptions(recorder.address, TOKEN, unary=unary)), lines, replies)
                plain = recorder.num_bytes
                split = ", ".join(f"{kind} {size / num_tokens:.2f}" for kind, size in recorder.by_kind())
            with answering(files) as (port, replies), EmulatedLink(("127.0.0.1", port)) as tls:
                replay(Link(LinkOptions(tls.address, TOKEN, ca, unary=unary)), lines, replies)
                sent = tls.bytes_up + tls.bytes_down
                print(
                    f"  {name}: {sent / num_tokens:.1f} with TLS ({tls.bytes_up / num_tokens:.1f} up, "
                    f"{tls.bytes_down / num_tokens:.1f} down); {plain / num_tokens:.1f} without: {split}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="?", type=Path, default=RECORDS)
    parser.add_argument("--mode", default="lossless;k=5")
    parser.add_argument("--socket", action="store_true")
    given = parser.parse_args()
    lines = [g for g in read_records(given.records).generations if g.mode == given.mode and g.link_ms is None]
    num_tokens = sum(len(line.token_ids) for line in lines)
    num_rounds = sum(len(line.rounds) for line in lines)
    print(f"{given.mode}: {num_tokens} tokens in {num_rounds} rounds, bytes of messages a token")
    for name, in_stream in (("a stream", True), ("unary calls", False)):
        sizes = [message_bytes(line, in_stream=in_stream) for line in lines]
        up, down = (sum(found) / num_tokens for found in zip(*sizes, strict=True))
        print(f"  {name}: {up + down:.2f} ({up:.2f} up, {down:.2f} down)")
    if given.socket:
        on_the_socket(lines, num_tokens)


if __name__ == "__main__":
    main()
