"""The Python interface: load two engines, generate, iterate over tokens with origins, read the stats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from skydraft.config import DecodingParams
from skydraft.decoding.adaptive import AutoK, FixedK, KPolicy
from skydraft.decoding.chat import render_prompt
from skydraft.decoding.choose import Chooser
from skydraft.decoding.context import Context
from skydraft.decoding.drafting import Drafter
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.stopping import Stopping
from skydraft.decoding.streaming import TextStream
from skydraft.decoding.verification import TargetVerifier
from skydraft.engines.base import Engine, EngineOptions
from skydraft.engines.registry import open_engine
from skydraft.engines.vocab import check_same
from skydraft.errors import OptionError
from skydraft.evaluation.stats import Stats, summarize
from skydraft.models import Progress, cache_dir, no_progress, resolve
from skydraft.types import FinishReason, Origin, Round, StepRecord, Token

Execution = Literal["exact", "throughput"]


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

    def __init__(self, loop: SpeculativeLoop, context: Context, stream: TextStream) -> None:
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


def generate(
    prompt: str,
    *,
    edge: Engine | None = None,
    cloud: Engine | None = None,
    plan: Plan | None = None,
    params: DecodingParams | None = None,
    system: str | None = None,
    raw: bool = False,
    with_signals: bool = False,
    execution: Execution = "exact",
) -> Generation:
    """Start a generation. `edge` drafts, `cloud` verifies; a plan with one model alone takes just that one.

    `plan` comes from `make_plan` (default: lossless). `raw` leaves the chat template away. `with_signals` measures
    the draft model's uncertainty even where the gate does not need it. `execution` "throughput" verifies in one
    forward instead of within `invariant_rows`: faster on a GPU, but near ties may fall otherwise than alone.
    Raises UsageError before anything is computed.
    """
    plan, params = plan or make_plan(), params or DecodingParams()
    draft = _required(edge, "edge") if plan.drafts else None
    target = _required(cloud, "cloud") if plan.verifies else None
    if draft and target:
        check_same(draft.vocab, target.vocab)
    # The one whose text this is sets the limits; a draft model with a shorter context stops drafting there.
    author = _required(target or draft, "cloud")
    vocab = author.vocab
    prompt_ids = vocab.encode(vocab.bos_text + prompt if raw else render_prompt(vocab, prompt, system))
    author.check_prompt(prompt_ids)
    max_len = min(len(prompt_ids) + params.max_new_tokens, author.context_len)
    chooser = Chooser(params, vocab, len(prompt_ids))
    stopping = Stopping(params, vocab, len(prompt_ids), max_len)
    context = Context(prompt_ids)
    drafter = Drafter(draft, chooser, stopping, plan, with_signals=with_signals) if draft else None
    verifier = None
    if target:
        max_rows = target.invariant_rows if execution == "exact" else target.max_output_rows
        verifier = TargetVerifier(target, prompt_ids, chooser, stopping, max_rows=max_rows, top=plan.top)
    k_policy = _k_policy(plan, draft, target, verifier)
    loop = SpeculativeLoop(context, drafter, plan.gate, verifier, k_policy, stopping, vocab)
    return Generation(loop, context, TextStream(vocab, params.stop))


def _required(engine: Engine | None, side: str) -> Engine:
    if engine is None:
        raise OptionError(f"This plan needs the {side} model.", hint=f"Pass {side}=skydraft.load(NAME).")
    return engine


def _k_policy(plan: Plan, draft: Engine | None, target: Engine | None, verifier: TargetVerifier | None) -> KPolicy:
    if plan.k is not None:
        return FixedK(plan.k)
    assert draft and target and verifier  # make_plan allows an adaptive k with two models only
    # A gate judges drafts, so only where every block is verified anyway may a round draft nothing.
    min_k = 0 if plan.gate.kind == "always" else 1
    return AutoK(draft.profile, target.profile, verifier.max_rows, min_k=min_k)
