"""Bytes of messages a generated token: the recorded rounds of a comparison once more through the codec. No model.

    python -m bench.payload [RECORDS] [--mode lossless]

Sums VerifyRequest and VerifyReply of the mode's generations in process, openings included, with the recorded costs and
a queue of 0.1 ms. What a socket adds (HTTP/2, TLS) is measured by bench.cloud.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from skydraft.evaluation.records import GenerationLine, read_records
from skydraft.protocol.codec import encode_verdict, encode_verify_call
from skydraft.protocol.values import Opening, VerifyCall
from skydraft.types import Cost, Prompt, Verdict

RECORDS = Path(__file__).parent.parent / "docs" / "report-zh-dev" / "records.jsonl"
_SESSION, _DIGEST, _TYPICAL_ID = 2_000_000, 0xDEADBEEF, 100_000


def message_bytes(line: GenerationLine) -> tuple[int, int]:
    """(bytes up, bytes down) of one generation."""
    up = down = 0
    opening = Opening("0" * 16, Prompt((_TYPICAL_ID,) * line.num_prompt_tokens))
    for entry in line.rounds:
        record = entry.record
        call = VerifyCall(_SESSION, 0, record.base, (), entry.draft_ids, _DIGEST, None if record.base else opening)
        is_last = record.base + record.num_committed == len(line.token_ids)
        own = line.token_ids[record.base + record.num_accepted :][: record.num_committed - record.num_accepted]
        cost = Cost(
            record.target.num_passes,
            record.target.num_rows,
            record.target.forward_ms,
            record.target.prefill_ms,
            queue_ms=0.1,
        )
        token_id, finish = own[0] if own else None, line.finish if is_last else None
        up += len(encode_verify_call(call))
        down += len(encode_verdict(Verdict(record.base, record.num_accepted, token_id, finish, cost=cost)))
    return up, down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="?", type=Path, default=RECORDS)
    parser.add_argument("--mode", default="lossless")
    given = parser.parse_args()
    lines = [g for g in read_records(given.records).generations if g.mode == given.mode and g.link_ms is None]
    num_tokens = sum(len(line.token_ids) for line in lines)
    up, down = (sum(found) / num_tokens for found in zip(*map(message_bytes, lines), strict=True))
    print(f"{given.mode}: {up + down:.2f} bytes a token ({up:.2f} up, {down:.2f} down), {num_tokens} tokens")


if __name__ == "__main__":
    main()
