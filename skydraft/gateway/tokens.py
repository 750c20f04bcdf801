"""`/tokenize` and `/detokenize`: text to tokens and back, in the words of llama.cpp and of vLLM."""

from contextlib import suppress
from typing import Any

from pydantic import AliasChoices, BaseModel, Field

from skydraft.engines.vocab import Vocab
from skydraft.gateway.requests import check_ids, named
from skydraft.gateway.schema import TokenIds
from skydraft.prompts.pair import check_length


class TokenizeRequest(BaseModel):
    """Special tokens that are written out are read as such, and none is added unless asked for."""

    content: str = Field(validation_alias=AliasChoices("content", "prompt"))
    add_special: bool = Field(False, validation_alias=AliasChoices("add_special", "add_special_tokens"))
    with_pieces: bool = False

    def answer(self, vocab: Vocab, limit: int) -> dict[str, Any]:
        """Raises Refusal, soon, for far more than `limit`: one thread reads for all keys."""
        named("content", lambda: check_length(vocab, self.content, limit))
        token_ids = vocab.encode(vocab.bos_text * self.add_special + self.content)
        tokens = [_piece(vocab, each) for each in token_ids] if self.with_pieces else token_ids
        return {"tokens": tokens, "count": len(token_ids)}


class DetokenizeRequest(BaseModel):
    tokens: TokenIds

    def answer(self, vocab: Vocab, limit: int) -> dict[str, Any]:
        check_ids(self.tokens, vocab, "tokens")
        text = vocab.written(self.tokens)  # special tokens too
        return {"content": text, "prompt": text}


def _piece(vocab: Vocab, token_id: int) -> dict[str, Any]:
    data = vocab.name_bytes(token_id)  # perhaps no whole characters
    with suppress(UnicodeDecodeError):
        return {"id": token_id, "piece": data.decode()}
    return {"id": token_id, "piece": list(data)}
