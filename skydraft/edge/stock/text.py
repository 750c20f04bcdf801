"""One text at a server without skydraft. The server keeps no state: each request carries all tokens.

To check a draft, the target writes from the base, and its tokens are compared with the draft. The same request then
continues. `choices` turns the server's tokens into the text's. A chat writes the whole answer in one request.
"""

import codecs
import time
from dataclasses import replace

import numpy as np

from skydraft.choosing.stopping import Stopping
from skydraft.decoding.context import Context
from skydraft.decoding.request import GenerateRequest, Prepared
from skydraft.decoding.verification import Rules, Verification
from skydraft.edge.channel import Waiting
from skydraft.edge.stock.chat import Chat
from skydraft.edge.stock.choices import Choices, check
from skydraft.edge.stock.connection import DIALECTS, StockConnection, StockInfo
from skydraft.edge.stock.dialect import Body, Dialect, IdDialect, Row, read_safely
from skydraft.edge.stock.drafts import DraftedText
from skydraft.edge.stock.ids import LlamaServer
from skydraft.edge.stock.ledger import Ledger, Request
from skydraft.edge.stock.wire import Events, as_json
from skydraft.edge.stock.writing import ChatWriting, Writing
from skydraft.engines.vocab import TokenIds, Vocab
from skydraft.errors import BrokenOff, CloudFailure, LimitExceeded, OptionError, SkydraftError, TargetChanged, or_else
from skydraft.protocol.values import TargetId
from skydraft.types import Cost, Draft, DraftBlock, LinkCost, Verdict

_MAX_DRAWS, _MAX_CHAR = 16, 4  # tries for a token that a stream withheld; the most tokens of a character
_LOOK_S = 3.0  # ping timeout for a chat host far away


class StockText:
    target: TargetId | None = None  # such a server does not identify its weights

    def __init__(self, server: StockConnection, context: Context, vocab: Vocab, request: Prepared) -> None:
        prompt = request.prompts.target
        if request.num_best is not None or prompt.media:
            what = "takes no audio" if prompt.media else "tells no log-probabilities of the tokens that it checks"
            raise OptionError(f"A server without skydraft {what}.", hint="Use skydraft serve, or --mode edge.")
        self._server, self._context, self._vocab = server, context, vocab
        self._prompt = np.array(prompt.token_ids, np.int32)
        self._params, self._given = request.params, request
        self._messages = tuple(
            {"role": each.role, "content": each.content}
            | {name: value for name, value in each.more if name != "reasoning_content"}
            for each in request.messages
        )
        in_prompt = vocab.end_ids & set(prompt.token_ids)  # the template ends turns with it
        self._end_id = min(in_prompt or vocab.end_ids, default=0)
        self._kind: type[Dialect] | None = None
        if kind := DIALECTS.get(server.kind):
            self._choose_at(kind)
        self._info = server.known  # the server's description when the text began
        self._writing: Writing | None = None
        self._drafted: DraftedText | None = None  # the same request, if it takes drafts
        self._branch: Draft | None = None  # all drafts of the newest branch
        self._carries_grammar = False  # whether the request of `_writing` has the grammar
        self._text = self._prompt  # all judged and written tokens while the target writes
        self._limit: int | None = None  # the text's length in tokens at which the target stops
        self._is_stopped = False
        self._broken_by: SkydraftError | None = None  # the error that ended the last stream
        self._ledger = Ledger(server.budget, server.address, len(self._prompt))
        self._wire = replace(server.wire, ledger=self._ledger)
        self.sent = self._ledger.sent

    def _choose_at(self, kind: type[Dialect]) -> None:
        """Set the text's rules for this kind of server. Raises OptionError for options that it cannot follow."""
        if kind is Chat:
            _check_chat(self._given)
        check(self._params, self._given.plan, kind)
        prompt_len, params, vocab = len(self._prompt), self._params, self._vocab
        self._kind, self._choices = kind, Choices(params, vocab, prompt_len, kind)
        self._rules = Rules(prompt_len, self._choices.chooser, Stopping(params, vocab, params.max_new_tokens))

    @property
    def resumes(self) -> bool:
        return self._kind is not Chat

    @property
    def is_writing(self) -> bool:
        return self._limit is not None

    @property
    def spent(self) -> LinkCost:
        return self._ledger.spent

    def reopen(self, server: StockConnection | None = None, *, renumber: bool = False) -> None:
        self.break_off()
        self._server.forget()

    def break_off(self) -> None:
        self._limit = None
        self._drop()

    async def renew(self) -> None:
        self.break_off()
        await self._server.renew()

    async def open(self, waiting: Waiting) -> None:
        await self._ask_who(self._prompt, waiting)  # a request for the prompt alone would cost a token

    async def verify(self, block: DraftBlock, catch_up: tuple[int, ...], write: int, waiting: Waiting) -> Verdict:
        """Return the verdict. The tokens of `catch_up` are not audited: the server reads them as part of the prompt."""
        began, self._limit = time.perf_counter(), None
        seen = np.concatenate((self._prompt, self._context.generated))
        with or_else(self.break_off):
            verdict, _ = await self._judge(seen, block, write, waiting)
        self._text = np.concatenate((seen, np.array(verdict.commits(block), np.int32)))
        await self._read_rest(verdict)
        if write > 0 and verdict.hands_over(block):
            self._limit, self._is_stopped = len(self._text) + min(write, self._room(self._text)), False
        else:
            self._drop()
        forward_ms = max((time.perf_counter() - began) * 1e3 - self._server.rtt_ms, 0.0)
        num = verdict.num_tokens
        cost = Cost(num, num, forward_ms=forward_ms, num_cached=self._ledger.take_cached())
        return replace(verdict, cost=cost)

    async def _judge(self, seen: TokenIds, block: DraftBlock, write: int, waiting: Waiting) -> tuple[Verdict, Row]:
        info = await self._ask_who(seen, waiting)
        if (room := self._room(seen)) < 1:  # through tokens that were committed without a check
            raise LimitExceeded(f"The text has outgrown the server's context of {info.card.context_len} tokens.")
        draft = np.array(block.token_ids[:room], np.int32)
        text, work, num_rows = np.concatenate((seen, draft)), Verification(self._rules, seen, block), 0
        while work.next_feed(1) is not None:
            so_far, limit = text[: len(seen) + num_rows], len(draft) - num_rows + 1 + write
            token_id, row = await self._row_after(so_far, limit, waiting)
            work.absorb(np.array([token_id], np.int32))
            num_rows += 1
        verdict = work.verdict(Cost())
        return replace(verdict, finish=row.finish or verdict.finish), row

    async def next_written(self, waiting: Waiting) -> Verdict | None:
        assert self._limit is not None
        written, verdict, is_over = list[int](), None, False
        with or_else(self.break_off):
            while not self._is_stopped or await self._has_arrived(waiting):
                block = DraftBlock(len(self._text) - len(self._prompt), ())
                verdict, row = await self._judge(self._text, block, self._limit - len(self._text) - 1, waiting)
                self._text = np.append(self._text, np.int32(verdict.commits()[-1]))
                written += verdict.commits()
                is_over = verdict.finish is not None or len(self._text) >= self._limit
                is_draft = self._drafted is not None and self._drafted.has_sent(self._text)
                if row.goes_on and self._drafted and not is_draft:
                    self._drafted.port.grouped()
                if is_over or not (row.goes_on and is_draft):
                    break  # else this was a draft that vLLM accepted: report it with the next token
        await self._read_rest(verdict)
        if is_over or verdict is None:
            self.break_off()
        if verdict is None:
            return None
        *drafts, _ = written  # all but the last token
        base, cost = verdict.base - len(drafts), Cost(1, 1, num_cached=self._ledger.take_cached())
        return replace(verdict, base=base, num_accepted=len(drafts), draft_ids=tuple(drafts), cost=cost)

    async def _read_rest(self, verdict: Verdict | None) -> None:
        if verdict is not None and verdict.finish and self._writing is not None:
            await self._writing.rest()

    async def _has_arrived(self, waiting: Waiting) -> bool:
        writing = self._writing
        return writing is not None and writing.continues(self._text) and await writing.arrived(waiting)

    def draft(self, draft: Draft) -> None:
        self._branch = draft.after(self._branch)
        self._send_drafts()

    def _send_drafts(self) -> None:
        if self._drafted and self._branch:
            self._drafted.draft(self._branch, self._text)

    def stop(self) -> None:
        self._is_stopped = True

    async def close(self) -> None:
        self.break_off()

    async def _ask_who(self, text: TokenIds, waiting: Waiting) -> StockInfo:
        """Return the server's kind and model; ask unless it is already writing after `text`. Raises TargetChanged if
        they have changed, BrokenOff if the server cannot continue from `text`."""
        if self._info is not None and self._writing is not None and self._writing.continues(text):
            return self._info
        self._check_resumes(text)
        info = await self._who(waiting)
        self._check_resumes(text)
        return info

    async def _who(self, waiting: Waiting) -> StockInfo:
        known = self._info
        info = await self._server.info_for(self._vocab, waiting, self._wire)
        self._ledger.tells_cached = info.dialect.separates or not self._given.shares_target
        if self._kind is not type(info.dialect):
            self._choose_at(type(info.dialect))
        if known is None or known.is_of(info):
            self._info = info
            self._bound(info.card.context_len)
            return info
        says = f"The server at {self._server.address} runs {info.model} now; this text began with {known.model}."
        raise TargetChanged(says)

    def _check_resumes(self, text: TokenIds) -> None:
        if not self.resumes and len(text) > len(self._prompt):
            why = f": {self._broken_by.line}" if self._broken_by else "."
            raise BrokenOff(f"The chat ended within its answer, and a chat cannot go on{why}")

    def _bound(self, context_len: int) -> None:
        room = context_len - len(self._prompt)
        if context_len and room < 1:
            raise LimitExceeded(f"The prompt has {len(self._prompt)} tokens, but the server takes {context_len}.")
        if context_len and room < self._rules.stopping.max_new_tokens:
            self._rules = replace(self._rules, stopping=Stopping(self._params, self._vocab, room))

    def _room(self, text: TokenIds) -> int:
        return self._rules.stopping.max_new_tokens - (len(text) - len(self._prompt))

    async def _row_after(self, text: TokenIds, num_tokens: int, waiting: Waiting) -> tuple[int, Row]:
        """Return the text's next token, and the server's row for it; a forced token needs no row."""
        info = await self._ask_who(text, waiting)
        choices = self._choices
        if (forced := choices.forced(text)) is not None:
            return forced, Row(forced)
        row = await self._next_row(info, text, num_tokens, waiting)
        return choices.taken(row, text, self._end_id), row

    async def _next_row(self, info: StockInfo, text: TokenIds, num_tokens: int, waiting: Waiting) -> Row:
        """Return the row after a text: the next of the current stream, or the first of a new one."""
        with_grammar = self._choices.begins(text)
        for _ in range(3):  # a stream may end early, or start an answer without its grammar
            writing = self._writing
            if writing is None or not writing.continues(text) or (with_grammar and not self._carries_grammar):
                self._drop()
                num_tokens, self._carries_grammar = max(min(num_tokens, self._room(text)), 1), with_grammar
                self._writing = writing = self._begin(info, text, num_tokens)
            try:
                row = await writing.next_row(waiting)
            except CloudFailure as error:
                self._server.refused |= info.dialect.refused_by(error.message)
                raise
            await self._check_model(writing.request, waiting)
            if row is not None and not with_grammar and self._choices.begins(text, row.token_id):
                with_grammar = True
                continue
            if row is not None:
                return row
            self._broken_by = writing.error
            self._drop()
            if writing.has_gap and isinstance(info.dialect, LlamaServer):
                return await self._untold_row(info.dialect, info, text, waiting)
            if writing.error:
                self._server.forget()
            info = await self._ask_who(text, waiting)
        raise CloudFailure("The server ended the text without a token.")

    async def _untold_row(self, dialect: LlamaServer, info: StockInfo, text: TokenIds, waiting: Waiting) -> Row:
        """Fetch a token that the stream withheld because it ends inside a UTF-8 character. If the server samples, retry
        until the token does: any other token would make such characters rarer."""
        params = self._choices.asked(text, with_grammar=False)
        for _ in range(_MAX_DRAWS):
            path, body = dialect.one(info.model, text.tolist(), params)
            request = self._request(info, path, body, text, num_written=1)
            answer = await self._wire.patiently(self._wire.whole(request), dialect.life, waiting)
            request.says(LinkCost(tokens_out=1))
            read = read_safely(dialect.one_written, answer)
            request.says(read.usage)
            await self._check_model(request, waiting)
            if len(read.rows) != 1:
                raise CloudFailure(f"The server wrote {len(read.rows)} tokens in place of one.")
            (row,) = read.rows
            written = self._vocab.text_bytes([*text[len(self._prompt) :][-_MAX_CHAR:].tolist(), row.token_id])
            if not params.temperature or codecs.utf_8_decode(written, "replace", False)[1] < len(written):
                break
        return row

    def _request(self, info: StockInfo, path: str, body: Body, text: TokenIds, num_written: int = 0) -> Request:
        scope = self._given.cache_scope
        salt = {info.dialect.salt: scope} if info.dialect.salt and scope else {}
        num_committed = len(self._context.generated)
        return Request(self._ledger, path, as_json({**body, **salt}), text, num_committed, num_written)

    def _begin(self, info: StockInfo, text: TokenIds, num_tokens: int) -> Writing:
        dialect, choices = info.dialect, self._choices
        if isinstance(dialect, IdDialect):
            params = choices.asked(text, with_grammar=self._carries_grammar)
            path, body = dialect.writing(info.model, text.tolist(), num_tokens, params)
            if self._server.drafts and dialect.takes_drafts:
                self._drafted = DraftedText(self._server.drafts, text, len(self._prompt), self._ledger)
                body = {**body, **self._drafted.field}
                self._send_drafts()
            events = Events(self._wire, self._request(info, path, body, text), dialect.life)
            return Writing(events, dialect, text, num_tokens)
        assert isinstance(dialect, Chat)
        params = self._params
        path, body = dialect.asking(info.model, self._messages, params, self._server.refused)
        wire = replace(self._wire, look_s=_LOOK_S)  # a host far away takes longer to answer a ping
        events = Events(wire, self._request(info, path, body, text), dialect.life)
        opened = params.think_end if not params.think_start else ""  # our template opened the thoughts: close them
        before = self._vocab.encode(f"{opened}\n\n") if opened else ()
        return ChatWriting(events, dialect, text, num_tokens, self._vocab, self._end_id, before)

    async def _check_model(self, request: Request, waiting: Waiting) -> None:
        """Raise TargetChanged if another model answered. A new connection may mean that the server was restarted, so
        ask again what it runs."""
        if request.is_new and self.resumes:  # a chat's text is one answer
            request.is_new = False
            self._server.forget()
            await self._who(waiting)

    def _drop(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.close()
        if self._drafted is not None:
            self._drafted.end()
            self._drafted = None


def _check_chat(request: GenerateRequest) -> None:
    """Raise OptionError for requests that a chat's messages cannot express."""
    calls = {"tool_calls", "tool_call_id"} & {name for each in request.messages for name, _ in each.more}
    is_begun = request.begun or any(message.is_open for message in request.messages)
    if request.raw or not request.messages or request.tools or calls or is_begun:
        says = "A chat server takes only messages: no tools, no raw prompts, no partial answers. Mode edge takes all."
        raise OptionError(says, hint="Use skydraft serve, vLLM, SGLang or llama-server.")


class StockServer(StockConnection):
    """`Server` over HTTP."""

    def begin(self, context: Context, vocab: Vocab, request: Prepared) -> StockText:
        return StockText(self, context, vocab, request)
