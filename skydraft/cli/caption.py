"""`skydraft caption`: a sentence about the speaker of each of many recordings, as JSON lines or CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import click

from skydraft import api
from skydraft.cli.connection import cloud_options, take_cloud
from skydraft.cli.options import build_engine_options, decoding_options, engine_options, load_engine, target_name
from skydraft.cli.progress import counted
from skydraft.cli.running import given_overrides
from skydraft.cli.speech import STYLE, Speech, read_recording, speech_options, take_share
from skydraft.config import CAPTION_PROMPT, decoding_params
from skydraft.decoding.plan import make_plan
from skydraft.engines.audio import load_library
from skydraft.errors import CloudError, OptionError, SkydraftError

_MAX_NEW_TOKENS = 128


@click.command()
@click.argument("files", nargs=-1, required=True, type=Path)
@click.option("--prompt", default=CAPTION_PROMPT, show_default=True, help="What is asked about each recording.")
@click.option("--mode", default="quality", show_default=True, metavar="M", help="As in skydraft generate.")
@click.option("--gate", metavar="G", help="Likewise.")
@click.option("--k", metavar="N", help="Likewise.")
@click.option("--out", type=Path, metavar="FILE", help="Where to write; the default is stdout.")
@click.option("--format", "form", type=click.Choice(["jsonl", "csv"]), help="Default: as --out ends, else jsonl.")
@speech_options
@cloud_options
@engine_options
@decoding_options
def caption(files: tuple[Path, ...], prompt: str, out: Path | None, form: str | None, **given: Any) -> int:
    """Describe the speaker of each of FILES in one sentence.

    A file that cannot be used is named on stderr and in the output, the others are done; the exit status is 1 then.
    """
    load_library()  # refuse now, not after the models are loaded
    plan = make_plan(given.pop("mode"), given.pop("gate"), given.pop("k"))
    share = take_share(given, plan, is_remote=given["cloud"] is not None)
    if given["cloud"] and given["cloud_model"]:
        raise OptionError("--cloud-model runs in this process, --cloud on a server: choose one.")
    if given["cloud"] and not plan.verifies:
        raise OptionError("--cloud has no place where the draft model works alone.")
    overrides = given_overrides(given, max_new_tokens=_MAX_NEW_TOKENS, style=STYLE)
    params = decoding_params(overrides.pop("style", None), **overrides)
    num_failed = 0
    with ExitStack() as stack:
        remote = take_cloud(given)
        if remote:
            stack.callback(remote.close)
        options, offline = build_engine_options(given), given.pop("offline")
        file = stack.enter_context(_open(out))
        edge = load_engine(given["edge_model"], options, offline=offline) if plan.drafts or remote else None
        if edge and not edge.takes_audio:
            raise OptionError(
                f"{edge.name} takes no audio.",
                hint="Give --edge-model Qwen/Qwen2.5-Omni-3B or such, and --cloud-model; tiny-omni-edge is a toy.",
            )
        cloud = remote or (load_engine(target_name(given), options, offline=offline) if plan.verifies else None)
        write = _writer(file, form or ("csv" if out and out.suffix == ".csv" else "jsonl"))
        done = stack.enter_context(counted(len(files), "recordings"))
        for path in files:
            try:
                recording = read_recording(path, given["max_audio_s"])
                with api.generate(
                    prompt, edge=edge, cloud=cloud, plan=plan, params=params, audio=recording.audio, share_audio=share
                ) as generation:
                    generation.run()
                speech = recording.used(generation, share)
                write(_row(path, generation, speech))
            except (CloudError, OptionError):
                raise  # the next recording would fare no better
            except SkydraftError as error:
                num_failed += 1
                click.echo(f"skydraft: {error}", err=True)
                write({"file": str(path), "error": str(error)})
            done()
    return 1 if num_failed else 0


_COLUMNS = ("file", "text", "error", "duration_s", "finish_reason", "num_tokens", "num_escalated", "share",
            "bytes_shared", "preprocess_ms", "tokens_per_s", "ttft_ms")  # fmt: skip


def _row(path: Path, generation: api.Generation, speech: Speech) -> dict[str, Any]:
    stats = generation.stats
    said = dataclasses.asdict(speech)
    del said["path"]
    return {
        "file": str(path),
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        **said,
        "num_tokens": stats.num_tokens,
        "num_escalated": stats.num_escalated,
        "cloud_calls_per_token": stats.cloud_calls_per_token,
        "tokens_per_s": stats.tokens_per_s,
        "ttft_ms": stats.ttft_ms,
    }


def _open(out: Path | None) -> Any:
    if out is None:
        return _Standard()
    try:
        return out.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise OptionError(f"{out} cannot be written: {error.strerror}.") from error


class _Standard:
    """stdout as a file that is not closed."""

    def __enter__(self) -> TextIO:
        return sys.stdout

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()


def _writer(file: TextIO, form: str) -> Callable[[dict[str, Any]], None]:
    """Writes a row as soon as it is there, so that an interrupted run keeps what it has."""
    table = csv.DictWriter(file, _COLUMNS, extrasaction="ignore") if form == "csv" else None
    if table:
        table.writeheader()

    def write(row: dict[str, Any]) -> None:
        if table:
            table.writerow(row)
        else:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()

    return write
