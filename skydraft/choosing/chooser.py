from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from skydraft.choosing.constraints import constraints_of
from skydraft.choosing.grammar import GrammarAlong, compile_grammar, masked, only_one
from skydraft.choosing.sampling import no_number, sample
from skydraft.choosing.thinking import ThinkingAlong
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Mask, TokenIds, Vocab
from skydraft.thinking import Place

Row: TypeAlias = npt.NDArray[Any]


_DRAW: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "top_p": 1.0, "min_p": 0.0}


class Chooser:
    """Chooses the next token, for draft and target, in every mode. For one thread at a time.

    Steps, in order, on the raw logits:
      0. with a grammar, -inf for every token that it forbids. If other constraints ban all that it allows,
         only the grammar applies. A spent thinking budget allows only the end tag
      1. repetition penalty (as transformers), frequency and presence penalty, logit bias (as OpenAI), n-gram ban,
         minimum length (as transformers)
      2. style constraints; these, the minimum length and a grammar begin after thinking
      3. at a temperature: only tokens near the best; temperature, once; top-k; top-p; min-p
      4. argmax of log p + noise(seed, position, token id)
    Raises OptionError for a zh style with a vocabulary without Chinese, or a bias for an unknown token id;
    GrammarRefused or MissingDependency for a grammar that does not compile here.
    """

    def __init__(self, params: DecodingParams, vocab: Vocab, prompt_len: int) -> None:
        self.params, self._vocab_size, self._prompt_len = params, vocab.size, prompt_len
        compiled = compile_grammar(params.grammar, vocab) if params.grammar else None
        self._grammar = GrammarAlong(compiled, vocab, prompt_len) if compiled else None
        self.has_grammar = compiled is not None
        self._constraints = constraints_of(params, vocab)
        self._thinking = ThinkingAlong(params, vocab) if params.think_end else None

    def choose(self, row: Row, prefix: TokenIds) -> int:
        """Return the token after `prefix` given its raw logits `row` [vocab]. Pure: same inputs, same token.

        At temperature 0 the best token, the lowest id among equals. Raises EngineError if a logit is not a number.
        """
        scores = self.constrain(row, prefix)
        if self.params.temperature:
            return sample(scores, self.params, self.position(prefix))
        best = int(scores.argmax())
        if np.isnan(scores[best]):
            raise no_number()
        return best

    def other(self, row: Row, prefix: TokenIds, token_id: int) -> int:
        """Replace a token that repeats a cycle by a seeded draw from the five best others at temperature 0.8. Returns
        the same token if no other is allowed."""
        scores = self.constrain(row, prefix).copy()
        scores[token_id] = -np.inf
        others = replace(self.params, **_DRAW)
        return sample(scores, others, self.position(prefix)) if scores.max() > -np.inf else token_id

    def position(self, prefix: TokenIds) -> int:
        """Return the position of the token after `prefix`, counted from the end of the prompt: prompts may differ."""
        return len(prefix) - self._prompt_len

    def constrain(self, row: Row, prefix: TokenIds) -> Row:
        """Return the logits [vocab] after steps 0 to 2. If 1 and 2 ban every token, only step 0 applies. `row` stays
        unchanged."""
        row = self.follow_grammar(row, prefix)
        if not self._constraints:
            return row
        edited, text = row.copy(), prefix[self._prompt_len :]
        place = self._thinking.at(text) if self._thinking else Place()
        for constraint, is_of_answer in self._constraints:
            if not (is_of_answer and place.thinks):
                constraint(edited, prefix, text[place.start if is_of_answer else 0 :])
        return row if edited.max() == -np.inf else edited

    def follow_grammar(self, row: Row, prefix: TokenIds) -> Row:
        allowed = self._allowed(prefix)
        return row if allowed is None else masked(row, allowed)

    def forced(self, prefix: TokenIds) -> int | None:
        """Return the only token allowed after `prefix`; None if there are several."""
        allowed = self._allowed(prefix)
        return None if allowed is None else only_one(allowed)

    def _allowed(self, prefix: TokenIds) -> Mask | None:
        """Return the mask [vocab] of tokens that grammar and thinking budget allow; None for all."""
        thinking, grammar, text = self._thinking, self._grammar, prefix[self._prompt_len :]
        if thinking and (token_id := thinking.forced(text)) is not None:
            mask: Mask = np.arange(self._vocab_size) == token_id
            return mask
        if not grammar or not thinking:
            return grammar.allowed(prefix) if grammar else None
        allowed = grammar.allowed(prefix[thinking.at(text).start :])
        return thinking.may_come(text, allowed, grammar.was_left)

    def has_left(self, prefix: TokenIds) -> bool:
        """Whether the answer in `prefix` breaks its grammar, if any."""
        if not self._grammar or (self._thinking and not self._thinking.at(prefix[self._prompt_len :]).has_ended):
            return False
        self._allowed(prefix)
        return self._grammar.was_left
