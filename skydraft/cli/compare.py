"""`skydraft compare`: prompts by modes, measured side by side; `skydraft report`: the page again, from records."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skydraft import api
from skydraft.cli.emulation import ServedTarget
from skydraft.cli.options import build_engine_options, decoding_options, engine_options, target_name
from skydraft.cli.progress import counted
from skydraft.cli.running import describe_run, given_overrides, load_pair
from skydraft.config import DEFAULT_K, DecodingParams, decoding_params
from skydraft.decoding.calibration import Calibration, check_fits, find_calibration, read_calibration
from skydraft.decoding.question import ShareAudio, ask, prompt_ids
from skydraft.decoding.streaming import TextStream
from skydraft.edge.cloud import Cloud
from skydraft.engines.audio import Audio, load_audio
from skydraft.errors import OptionError
from skydraft.evaluation.compare import Comparison, Job, PeerText
from skydraft.evaluation.modes import Mode, parse_modes
from skydraft.evaluation.records import PromptEntry, ScoreLine, read_records
from skydraft.evaluation.report.page import write_report
from skydraft.evaluation.scoring import Scorer
from skydraft.evaluation.workloads import Workload, read_prompts
from skydraft.models import cache_dir

if TYPE_CHECKING:
    from skydraft.engines.hf_peer import HuggingFacePair

_MODES = "edge,cloud,lossless,fluency,quality"
_MAX_NEW_TOKENS = 64
_LINK_PROMPTS = 8


@click.command()
@click.option("--prompts", "path", required=True, type=Path, metavar="FILE", help="Prompts: .jsonl or lines of text.")
@click.option(
    "--modes",
    default=_MODES,
    show_default=True,
    metavar="A,B,…",
    help="Presets, gate=G;k=N;eager;accept=RULE;style=S spelled out, or hf-target and hf-assisted (transformers).",
)
@click.option("--out", default="comparison", show_default=True, type=Path, metavar="DIR", help="Where all of it goes.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N prompts only.")
@click.option("--categories", metavar="A,B,…", help="Prompts of these categories only.")
@click.option("--repetitions", type=click.IntRange(min=1), default=1, show_default=True, metavar="N")
@click.option(
    "--emulate-rtt",
    type=click.FloatRange(min=0),
    multiple=True,
    metavar="MS",
    help="Also over an emulated link with this round trip; may be repeated.",
)
@click.option("--emulate-kbps", type=click.FloatRange(min=0), help="Bandwidth of that link; the default is no limit.")
@click.option("--link-prompts", type=click.IntRange(min=1), help=f"Prompts over the link (default {_LINK_PROMPTS}).")
@click.option("--calibration", type=Path, metavar="FILE", help="For calibrated gates, instead of the pair's own.")
@click.option(
    "--share-audio",
    type=click.Choice(["features", "none"]),
    default="features",
    show_default=True,
    help="For prompts with recordings: what the target gets of them.",
)
@click.option("--no-scores", is_flag=True, help="Leave out what both models think of the texts (agreement, NLL).")
@click.option("--execution", type=click.Choice(["exact", "throughput"]), default="exact", show_default=True)
@engine_options
@decoding_options
def compare(path: Path, modes: str, out: Path, **given: Any) -> None:
    """Run prompts in several modes, interleaved and warm; write records, summary and a report to DIR.

    An interrupted comparison goes on where it stopped when it is started again with the same options.
    """
    parsed = parse_modes(modes)
    workload = read_prompts(
        path, limit=given.pop("limit"), categories=tuple(filter(None, (given.pop("categories") or "").split(",")))
    )
    calibration = read_calibration(found) if (found := given.pop("calibration")) else None
    overrides = given_overrides(given, max_new_tokens=_MAX_NEW_TOKENS)
    links = _links(given)
    bench = _Bench(overrides, given, calibration)
    with ExitStack() as stack:
        bench.open(stack, links)
        bench.check(parsed, workload)
        run = describe_run(
            bench.edge, bench.cloud, workload, parsed,
            command="skydraft " + shlex.join(sys.argv[1:]), execution=bench.execution, overrides=overrides,
            repetitions=given["repetitions"], links=links, link_prompts=given["link_prompts"],
            engine_options=bench.options, peer=bench.peer_format(parsed),
            link_kbps=given["emulate_kbps"] or 0.0, calibration=bench.calibration,
            share_audio=bench.share_audio if any(prompt.audio for prompt in workload.prompts) else None,
        )  # fmt: skip
        comparison = Comparison(out, run, parsed)
        if comparison.num_done:
            click.echo(f"Going on with {comparison.path}, which has {comparison.num_done} generations.", err=True)
        with counted(comparison.num_done + len(comparison.todo), "generations", done=comparison.num_done) as done:
            comparison.generate(bench.start, bench.ask, done)
        if not given["no_scores"]:
            with counted(len(comparison.unscored()), "texts judged") as done:
                comparison.score(bench.score, done)
    _finish(out, comparison.path)


def _links(given: dict[str, Any]) -> tuple[float | None, ...]:
    """No link, and the emulated ones. Raises OptionError for an option about links where there is none."""
    rtts: tuple[float, ...] = given.pop("emulate_rtt")
    if len(set(rtts)) < len(rtts):
        raise OptionError("--emulate-rtt names the same round trip twice.")
    if not rtts and (given["emulate_kbps"] is not None or given["link_prompts"] is not None):
        option = "--emulate-kbps" if given["emulate_kbps"] is not None else "--link-prompts"
        raise OptionError(f"{option} is about an emulated link, which --emulate-rtt MS asks for.")
    given["link_prompts"] = given["link_prompts"] or _LINK_PROMPTS
    return (None, *rtts)


class _Bench:
    """The engines, links and parameters that the jobs of one comparison run on."""

    def __init__(self, overrides: dict[str, Any], given: dict[str, Any], calibration: Calibration | None) -> None:
        self._overrides, self._given, self.calibration = overrides, given, calibration
        self.execution = given.pop("execution")
        self._scorers: dict[str | None, Scorer] = {}
        self._peer: HuggingFacePair | None = None
        self._recordings: dict[str, Audio] = {}
        self.share_audio: ShareAudio = given.pop("share_audio")

    def open(self, stack: ExitStack, links: tuple[float | None, ...]) -> None:
        """Load both models; with links, start a server that holds the target once more."""
        self.options, offline = build_engine_options(self._given), self._given.pop("offline")
        options = self.options
        self.edge, self.cloud = load_pair(self._given, options, offline=offline)
        stack.callback(self._close_scorer)
        self._clouds: dict[float, Cloud] = {}
        if any(link is not None for link in links):
            served = stack.enter_context(
                ServedTarget(target_name(self._given), options, self.execution, offline=offline)
            )
            for rtt_ms in filter(lambda link: link is not None, links):
                assert rtt_ms is not None
                self._clouds[rtt_ms] = stack.enter_context(served.behind(rtt_ms, self._given["emulate_kbps"] or 0.0))

    def check(self, modes: tuple[Mode, ...], workload: Workload) -> None:
        """Refuse now what would be refused when its turn comes; recordings are read now. Raises UsageError."""
        self._recordings = {str(p.audio): load_audio(p.audio) for p in workload.prompts if p.audio}
        if self.share_audio == "none":
            if not self._recordings:
                raise OptionError("--share-audio is about recordings, and no prompt has one.")
            if any(mode.plan and not mode.plan.drafts for mode in modes):
                raise OptionError("Where no audio is shared, mode cloud would hear nothing.", hint="Leave it out.")
        if self._recordings and any(mode.peer for mode in modes):
            raise OptionError("hf-target and hf-assisted are compared on text alone.")
        for mode in modes:
            if mode.peer:
                self._peer_paths()
        calibrated = [mode.plan for mode in modes if mode.plan and mode.plan.gate.kind == "calibrated"]
        if self.calibration and not calibrated:
            raise OptionError("--calibration is for calibrated gates, and no mode here has one.")
        names = f"{self.edge.name} and {self.cloud.name}"
        if calibrated and self.calibration is None:
            folders = [cache_dir() / "calibrations"]
            self.calibration = find_calibration(folders, self.edge.fingerprint, self.cloud.fingerprint, names)
        if calibrated and self.calibration:
            check_fits(self.calibration, self.edge.fingerprint, self.cloud.fingerprint, names)

    def _params(self, mode: Mode) -> DecodingParams:
        style = mode.style or self._overrides.get("style")
        return decoding_params(style, **{key: value for key, value in self._overrides.items() if key != "style"})

    def start(self, job: Job) -> api.Generation:
        """Begin one generation."""
        assert job.mode.plan is not None  # peers are asked
        gate = job.mode.plan.gate.kind
        return api.generate(
            job.prompt.prompt,
            edge=self.edge,
            cloud=self.cloud if job.link_ms is None else self._clouds[job.link_ms],
            plan=job.mode.plan,
            params=self._params(job.mode),
            execution=self.execution if job.link_ms is None else "exact",
            calibration=self.calibration if gate == "calibrated" else None,
            audio=self._audio(job.prompt),
            share_audio=self.share_audio,
        )

    def _audio(self, prompt: PromptEntry) -> Audio | None:
        """The recording of a prompt, read before the clock ran."""
        return self._recordings[prompt.audio] if prompt.audio else None

    def ask(self, job: Job) -> PeerText:
        """Have transformers answer with the same pair. Raises OptionError where it could not be compared."""
        if self._peer is None:
            self._peer = self._load_peer()
        vocab, params = self.cloud.vocab, self._params(job.mode)
        ids = prompt_ids(vocab, job.prompt.prompt)
        token_ids, finish = self._peer.generate(
            ids,
            vocab.end_ids,
            assisted=job.mode.peer == "hf-assisted",
            max_new_tokens=params.max_new_tokens,
            k=DEFAULT_K,
        )
        stream = TextStream(vocab, ())
        pieces = [stream.push(token_id) for token_id in token_ids]
        if pieces:
            pieces[-1] += stream.finish()
        return PeerText(token_ids, tuple(pieces), finish, len(ids))

    def _load_peer(self) -> HuggingFacePair:
        from skydraft.engines.hf_peer import HuggingFacePair

        click.echo("Loading the pair once more, for transformers.", err=True)
        return HuggingFacePair(*self._peer_paths(), device=self.options.device, dtype=self.options.dtype)

    def peer_format(self, modes: tuple[Mode, ...]) -> str | None:
        """What the weights of a peer are, if there is one: not what our own engine computes with."""
        if not any(mode.peer for mode in modes):
            return None
        packed = any(path.suffix == ".gguf" for path in self._peer_paths())
        return f"{self.options.dtype}{', dequantised from the packed GGUF weights' if packed else ''}"

    def _peer_paths(self) -> tuple[Path, Path]:
        """Where the files of both models are. Raises OptionError where a peer could not be compared."""
        if set(self._overrides) - {"max_new_tokens"}:
            raise OptionError("hf-target and hf-assisted are compared greedily and without a style.")
        paths = [path for engine in (self.edge, self.cloud) if (path := getattr(engine, "path", None))]
        if len(paths) < 2:
            raise OptionError("hf-target and hf-assisted need models with files, which a toy has not.")
        return paths[0], paths[1]

    def score(self, prompt: PromptEntry, mode: Mode, token_ids: tuple[int, ...]) -> ScoreLine:
        """Judge one text."""
        if mode.style not in self._scorers:
            self._close_scorer()
            self._scorers = {mode.style: Scorer(self.edge, self.cloud, self._params(mode), mode.style)}
        audio = self._audio(prompt)
        question = ask(self.edge, audio.samples if audio else None, prompt.prompt, share=self.share_audio)
        return self._scorers[mode.style].score(prompt.id, question, token_ids)

    def _close_scorer(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


@click.command()
@click.argument("folder", type=Path)
def report(folder: Path) -> None:
    """Make summary.json and report.html in FOLDER again, from its records.jsonl. Needs no model."""
    _finish(folder, folder / "records.jsonl")


def _finish(out: Path, records: Path) -> None:
    page = write_report(read_records(records), out)
    click.echo(f"Report: {page}", err=True)
