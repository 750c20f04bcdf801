"""The request for one generation, frozen and checked once. It does not hold the models."""

from dataclasses import dataclass, field
from typing import Any

from skydraft.characters import is_whole
from skydraft.config import DecodingParams, Execution, check_execution
from skydraft.decoding.plan import Plan, make_plan
from skydraft.errors import OptionError, PromptError
from skydraft.gating.calibration import Calibration
from skydraft.prompts.messages import Message
from skydraft.prompts.pair import PromptPair, ShareAudio
from skydraft.prompts.thinking import Think
from skydraft.types import Reuse


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A conversation to answer, and the settings of the answer.

    `raw` continues the text of the last message without the chat template. `tools` are in OpenAI's format. `think`
    turns thinking on or off if the template can; "auto" leaves it to the template. `settings` are further values for
    the template. With `share_audio` "none" no recording goes to a target, so none can check. `execution` None is the
    default of the target's engine or server. `calibration` None looks up the pair's own if the gate needs one.
    With a `cache_scope` both sides keep and reuse the KV of prompts of that scope; the text does not change. With
    `num_best` each token is scored, with that many of the best tokens at its place. `scores_prompt` also scores the
    prompt; without `writes` only the prompt is scored. The answer begins with the tokens `begun`, which are final. If
    `begun_is_prompt`, they belong to the prompt: they are read faster, but noise and rules begin after them.
    With `shares_target` other owners use the target too, so figures of a shared cache stay hidden. `local_only` keeps
    the text on this device. `adapter` is the draft model's, by name or file. "auto" picks the one whose prompts begin
    like this one, "none" none; None is the setting of `load`. With `breaks_loops` an unchecked draft model leaves a
    cycle that it wrote twice. The answer may repeat parts of the text `prediction`. Raises PromptError or OptionError.
    """

    messages: tuple[Message, ...]
    plan: Plan = field(default_factory=make_plan)
    params: DecodingParams = field(default_factory=DecodingParams)
    raw: bool = False
    tools: tuple[Any, ...] = ()
    think: Think = "auto"
    settings: tuple[tuple[str, Any], ...] = ()
    share_audio: ShareAudio = "features"
    execution: Execution | None = None
    calibration: Calibration | None = None
    with_signals: bool = False
    cache_scope: str = ""
    shares_target: bool = False
    prompt_ids: tuple[int, ...] = ()
    num_best: int | None = None
    scores_prompt: bool = False
    writes: bool = True
    begun: tuple[int, ...] = ()
    begun_is_prompt: bool = False
    local_only: bool = False
    adapter: str | None = None
    breaks_loops: bool = False
    prediction: str = ""

    @property
    def reuse(self) -> Reuse | None:
        """The KV that may be reused, for models in this process."""
        return Reuse(self.cache_scope, exact=self.execution != "throughput") if self.cache_scope else None

    def __post_init__(self) -> None:
        if not isinstance(self.plan, Plan) or not isinstance(self.params, DecodingParams):
            raise OptionError("The plan must come from make_plan, the parameters from decoding_params.")
        if not self.messages and not self.prompt_ids:
            raise PromptError("There is no prompt.", hint="Give a prompt, or a recording (--audio).")
        texts = [(each.content, each.more) for each in self.messages], self.params.stop, self.params.think_end
        if not is_whole(texts, self.params.think_start, self.tools, self.settings, self.cache_scope, self.prediction):
            raise PromptError("A text or an option has half of a character.", hint="Leave out U+D800 to U+DFFF.")
        if self.raw and len(self.messages) > 1:
            hint = "Remove --raw, or give one prompt alone."
            raise OptionError("--raw continues a single text, without a system prompt or earlier messages.", hint=hint)
        if self.execution is not None:
            check_execution(self.execution)
        if self.share_audio == "none" and self.plan.verifies and any(message.audio for message in self.messages):
            hint = "Give --share-audio features, or --mode edge."
            raise OptionError("A target that does not hear a recording cannot check a text about it.", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(GenerateRequest):
    """A request with its prompts, which the builder makes once for each generation. Verifiers take only this.

    The messages are as the template reads them. The parameters have its thinking tags. The builder adapts the plan to
    the target and the draft model.
    """

    prompts: PromptPair
