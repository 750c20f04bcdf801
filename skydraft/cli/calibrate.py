"""`skydraft calibrate`: fit the calibrated gate to a pair of models."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import click

from skydraft import api
from skydraft.cli.options import build_engine_options, engine_options
from skydraft.cli.progress import counted
from skydraft.cli.running import load_pair
from skydraft.config import DecodingParams
from skydraft.decoding.calibration import MAX_BLOCK, Calibration, PairSide
from skydraft.decoding.plan import make_plan
from skydraft.decoding.question import ask
from skydraft.engines.audio import load_audio
from skydraft.engines.base import Engine
from skydraft.errors import OptionError
from skydraft.evaluation.fitting import Told, fit, sklearn_linear, told
from skydraft.evaluation.scoring import Scorer
from skydraft.evaluation.workloads import Workload, read_prompts
from skydraft.models import cache_dir

_PATHS: dict[Literal["target", "draft"], str] = {"target": "cloud", "draft": "edge"}
_SHOWN = (0.85, 0.9, 0.95, 0.98)


@click.command()
@click.option("--prompts", "path", required=True, type=Path, metavar="FILE", help="Prompts to fit on: .jsonl or lines.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N prompts only.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, metavar="N")
@click.option("--out", type=Path, metavar="FILE", help="Where to write (default: with the models, where it is found).")
@engine_options
def calibrate(path: Path, limit: int | None, max_new_tokens: int, out: Path | None, **given: Any) -> None:
    """Fit the gate calibrated:AGREEMENT (and mode auto) to a pair of models.

    Both models answer the prompts alone, greedily; at each token the draft model's uncertainty meets what the target
    would have said. Wants both models in this process. Use prompts of the kind you will ask.
    """
    sklearn_linear()  # refuse now, not after minutes
    workload = read_prompts(path, limit=limit)
    options, offline = build_engine_options(given), given.pop("offline")
    edge, cloud = load_pair(given, options, offline=offline)
    texts = _tell(edge, cloud, workload, max_new_tokens)
    found = fit(
        texts,
        PairSide(name=edge.name, fingerprint=edge.fingerprint),
        PairSide(name=cloud.name, fingerprint=cloud.fingerprint),
        workload=workload.name,
        sha256=workload.sha256,
        date=datetime.now(UTC).date().isoformat(),
        num_prompts=len(workload.prompts),
        max_new_tokens=max_new_tokens,
    )
    out = out or cache_dir() / "calibrations" / f"{edge.name}--{cloud.name}.json".replace("/", "_")
    _write(out, found)
    _show(found, texts, out)


def _tell(edge: Engine, cloud: Engine, workload: Workload, max_new_tokens: int) -> list[Told]:
    params = DecodingParams(max_new_tokens=max_new_tokens)
    scorer = Scorer(edge, cloud, params)
    texts: list[Told] = []
    with counted(len(workload.prompts), "prompts") as done:
        for prompt in workload.prompts:
            audio = load_audio(prompt.audio) if prompt.audio else None
            by_path = {
                path: api.generate(
                    prompt.prompt, edge=edge, cloud=cloud, plan=make_plan(mode), params=params, audio=audio
                ).run()
                for path, mode in _PATHS.items()
            }
            question = ask(edge, audio.samples if audio else None, prompt.prompt)
            for path, generation in by_path.items():
                texts.append(told(scorer.score(prompt.id, question, generation.token_ids), path))
            scorer.close()  # its sequences' seats are for the next generation
            done()
    return texts


def _write(out: Path, found: Calibration) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(found.model_dump_json(by_alias=True, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{out} cannot be written: {error.strerror}.") from error


def _show(found: Calibration, texts: list[Told], out: Path) -> None:
    alone = [text for text in texts if text.path == "draft"]
    num_tokens = sum(len(text.disagrees) for text in alone)
    agreement = 1 - sum(sum(text.disagrees) for text in alone) / num_tokens
    click.echo(f"{found.draft.name} alone agrees with {found.target.name} on {agreement:.3f} of {num_tokens} tokens.")
    click.echo(f"Disagreement is told with an AUROC of {found.fitted.auroc:.3f} on these prompts.")
    click.echo(f"Expected with k = {MAX_BLOCK}, blocks ending where the gate is passed (replayed on these prompts):")
    curve = found.curve(MAX_BLOCK)
    for wanted in _SHOWN:
        points = [point for point in curve.points if point.agreement >= wanted]
        if points and curve.points[-1].agreement < wanted:
            click.echo(f"  calibrated:{wanted:<5} {points[-1].calls_per_token:.3f} calls a token")
    click.echo(f"Written to {out}")
