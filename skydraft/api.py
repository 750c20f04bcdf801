"""The Python interface: load two engines, generate, iterate over tokens with origins, read the stats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skydraft.assembly import Sides, assemble, target_of
from skydraft.config import CAPTION_PROMPT, DecodingParams
from skydraft.decoding.calibration import Calibration
from skydraft.decoding.context import Context
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.question import Question, ShareAudio, ask
from skydraft.decoding.streaming import TextStream
from skydraft.decoding.target import Execution
from skydraft.engines.audio import Audio
from skydraft.engines.base import Engine, EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.engines.vocab import check_same
from skydraft.errors import OptionError, PromptError
from skydraft.evaluation.stats import Stats, summarize
from skydraft.models import Progress, cache_dir, no_progress, resolve
from skydraft.types import FinishReason, Origin, Round, StepRecord, Token

if TYPE_CHECKING:
    from skydraft.edge.cloud import Cloud


def load(
    model: str | os.PathLike[str],
    options: EngineOptions | None = None,
    *,
    offline: bool = False,
    progress: Progress = no_progress,
) -> Engine:
    """Open a model: a known name (fetched if it is not there), a .gguf file, a local folder, or a hub id.

    Row costs are probed at the first load and remembered in the cache folder. Raises a SkydraftError.
    """
    cache = cache_dir()
    options = options or EngineOptions()
    if options.profile_path is None:
        options = replace(options, profile_path=cache / "profiles.json")
    found = resolve(os.fspath(model), cache, offline=offline, progress=progress)
    return open_engine(found.kind, found.spec, found.path, options)


class Generation:
    """One generation under way. Iterate over it for tokens; the rest can be read at any time.

    Its end, `close` or leaving its `with` block frees the sequences; the engines stay open for the next one.
    """

    def __init__(self, loop: SpeculativeLoop, context: Context, stream: TextStream, question: Question) -> None:
        self.question = question
        self._loop = loop
        self._context = context
        self._stream = stream
        self._rounds: list[Round] = []
        self._texts: list[str] = []

    def rounds(self) -> Iterator[tuple[Round, list[Token]]]:
        """Rounds as they are committed, each with its tokens."""
        for done in self._loop.rounds():
            self._rounds.append(done)
            yield done, [self._show(done, index) for index in range(len(done.token_ids))]
        self.close()

    def __iter__(self) -> Iterator[Token]:
        for _, tokens in self.rounds():
            yield from tokens

    def _show(self, done: Round, index: int) -> Token:
        text = self._stream.push(done.token_ids[index])
        is_last = self._context.finish is not None and index + 1 == len(done.token_ids)
        text += self._stream.finish() if is_last else ""
        self._texts.append(text)
        return Token(done.token_ids[index], done.origins[index], text, done.record.round)

    def interrupt(self) -> str:
        """End after what is committed so far; `finish_reason` becomes "interrupted". Returns the text held back."""
        if self._context.finish is not None:
            return ""
        self._context.interrupt()
        self._texts.append(self._stream.finish())
        return self._texts[-1]

    def run(self) -> Generation:
        """Generate to the end."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Free the KV memory of this generation."""
        self._loop.close()

    def __del__(self) -> None:
        # One that is dropped half-way must not keep its seat in the engine.
        self.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The text shown so far, without special tokens and without a stop string."""
        return "".join(self._texts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, an end token included."""
        return tuple(token_id for done in self._rounds for token_id in done.token_ids)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each generated token came from."""
        return tuple(origin for done in self._rounds for origin in done.origins)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        return self._context.finish

    @property
    def shared_bytes(self) -> int:
        """Bytes of speech features that have left this device so far, those sent again included."""
        return self._loop.shared_bytes

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, chat template included."""
        return self._context.prompt_len

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """One record per round so far."""
        return tuple(done.record for done in self._rounds)

    @property
    def stats(self) -> Stats:
        """Figures over the rounds so far."""
        return summarize(self.records)


def connect(
    address: str,
    *,
    token: str | None = None,
    tls_ca: bytes | None = None,
    tls_name: str | None = None,
    insecure: bool = False,
    timeout_s: float = 30.0,
    require: bool = False,
    open_ahead: bool = False,
    notify: Callable[[str], None] | None = None,
) -> Cloud:
    """A cloud verifier at HOST:PORT, to be passed to `generate` as `cloud`. Nothing is sent before it is needed.

    Beyond this machine TLS is spoken: by the system's roots, or by `tls_ca` (PEM), to a server called `tls_name` or as
    its address says; `insecure` speaks plaintext. `timeout_s` is how long an answer is waited for; a gated plan goes on
    alone within a second of silence, unless `require`. `open_ahead` opens each session in the
    background at once. `notify` gets a line when the cloud goes and when it is back. Raises OptionError.
    """
    from skydraft.edge.cloud import Cloud
    from skydraft.edge.link import LinkOptions

    link = LinkOptions(address, token=token, tls_ca=tls_ca, tls_name=tls_name, insecure=insecure)
    behaviour: dict[str, Any] = {"notify": notify} if notify else {}
    return Cloud(link, timeout_s=timeout_s, require=require, open_ahead=open_ahead, **behaviour)


def generate(
    prompt: str | None = None,
    *,
    edge: Engine | None = None,
    cloud: Engine | Cloud | None = None,
    plan: Plan | None = None,
    params: DecodingParams | None = None,
    system: str | None = None,
    raw: bool = False,
    with_signals: bool = False,
    execution: Execution = "exact",
    calibration: Calibration | None = None,
    audio: Audio | None = None,
    share_audio: ShareAudio = "features",
) -> Generation:
    """Start a generation. `edge` drafts, `cloud` verifies: an engine in this process, or a connection to a server.

    `plan` comes from `make_plan` (default: lossless); a plan with one model alone takes just that one, but with a
    remote cloud `edge` is needed in any case, for its tokenizer. `raw` leaves the chat template away. `with_signals`
    measures the draft model's uncertainty even where the gate does not need it. `execution` "throughput" verifies in
    one forward instead of within `invariant_rows`: faster on a GPU, but near ties may fall otherwise than alone; a
    server has its own. `calibration` is for a calibrated gate; None looks for one of this pair among those made here
    and those that come along. `audio` comes from `load_audio` and is heard by `edge` (by `cloud`, where that works
    alone); with `share_audio` "features" the target hears its features in half precision, with "none" it judges from
    the words alone. Without a prompt the speaker is described. Raises UsageError before anything is computed.
    """
    plan, params = plan or make_plan(), params or DecodingParams()
    if plan.verifies and cloud is None:
        raise _missing("cloud")
    here = cloud if isinstance(cloud, Engine) else None
    if edge is None and (plan.drafts or here is None):
        raise _missing("edge")
    if edge and here and plan.drafts and plan.verifies:
        check_same(edge.vocab, here.vocab)
    # The one whose text this is sets the limits; a draft model with a shorter context stops drafting there.
    local = here if here and plan.verifies else edge
    ears = edge if plan.drafts else local
    assert local is not None and ears is not None
    samples = audio.samples if audio else None
    if samples is not None and share_audio == "none" and not plan.drafts:
        raise OptionError("Where the target works alone and no audio is shared, nobody would hear it.")
    if prompt is None and audio is None:
        raise PromptError("There is nothing to answer.", hint="Give a prompt, or audio.")
    asked = CAPTION_PROMPT if prompt is None else prompt
    question = ask(ears, samples, asked, system=system, raw=raw, share=share_audio)
    target = target_of(cloud, execution) if plan.verifies and cloud else None
    author = local if here or not plan.verifies else None
    sides = Sides(edge if plan.drafts else None, target, author, local.vocab)
    loop, context = assemble(question, sides, plan, params, calibration, with_signals=with_signals)
    return Generation(loop, context, TextStream(local.vocab, params.stop), question)


def _missing(side: str) -> OptionError:
    return OptionError(f"This plan needs the {side} model.", hint=f"Pass {side}=skydraft.load(NAME).")
