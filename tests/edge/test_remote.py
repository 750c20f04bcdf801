"""Remote equals local: whatever a generation does over a link, it does in one process, and the other way round."""

import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.decoding.plan import Plan
from skydraft.engines.toy import open_toy
from skydraft.types import LinkCost

from .. import reference, toys
from ..cloud.driver import Watched
from ..decoding.test_hand_back import turns_of
from ..decoding.test_laws import assert_consistent, assert_whose, decode
from ..decoding.test_laws import gates as some_gates
from ..serving import Serving, serving, waiting
from ..toys import PROMPT, PROMPT_IDS, law
from .conftest import RACE, SEEDS

gates = st.just("always") | some_gates


def assert_same(remote: Generation, local: Generation) -> None:
    """Round by round; the rows of what the target writes on only in all."""
    assert (remote.token_ids, remote.text) == (local.token_ids, local.text)
    assert remote.finish_reason == local.finish_reason
    if remote.request.plan.back.num_tokens:  # drafts may come while the target writes
        far, near = (
            [(each.block.token_ids, each.token_ids) for each in done.rounds_so_far if each.record.outcome != "written"]
            for done in (remote, local)
        )
        assert far == near or local.stats.num_copied_tokens  # copies come as drafts, too
        return
    assert remote.origins == local.origins
    names = (
        "base", "outcome", "reason", "num_draft", "num_accepted", "num_committed", "num_forced", "num_audited",
        "num_agreed",
    )  # fmt: skip
    for far, near in zip(remote.rounds_so_far, local.rounds_so_far, strict=True):
        assert far.block == near.block and far.audit == near.audit
        for name in names:
            assert getattr(far.record, name) == getattr(near.record, name)
        assert far.record.draft.num_rows == near.record.draft.num_rows
        link, is_verified = far.record.link, far.record.outcome == "verified"
        assert (link.bytes_up > 0) == is_verified <= (link.bytes_down > 0)  # no stop is sent
        assert near.record.link == LinkCost() and link.shared_bytes == 0
    far_rows, near_rows = (sum(record.target.num_rows for record in done.records) for done in (remote, local))
    assert far_rows == near_rows


def plans(*hand_backs: str) -> st.SearchStrategy[Plan]:
    return st.builds(
        lambda gate, k, ends_early, hand_back: replace(
            make_plan(gate=gate, k=k, hand_back=hand_back), ends_early=ends_early and gate != "always"
        ),
        gates, st.integers(1, 12), st.booleans(), st.sampled_from(hand_backs),
    )  # fmt: skip


@law(125)
@given(st.sampled_from(SEEDS), st.sampled_from(toys.DRAFTERS), toys.params(), plans("0", "0", "1", "2", "7", "text"))
def test_remote_is_local(clouds: dict[int, Any], seed: int, drafter: Any, params: DecodingParams, plan: Any) -> None:
    edge = toys.toy(seed, drafter[0], sign=drafter[1])
    assert_same(decode(plan, params, edge, clouds[seed]), decode(plan, params, edge, toys.toy(seed)))


@law(100)
@given(st.sampled_from(SEEDS), st.sampled_from(toys.DRAFTERS), toys.params(), plans("agree:1", "agree:2", "agree:4"))
def test_where_a_stop_crosses_each_token_is_its_writers(
    clouds: dict[int, Any], seed: int, drafter: Any, params: DecodingParams, plan: Any
) -> None:
    edge, target = toys.toy(seed, drafter[0], sign=drafter[1]), toys.toy(seed)
    done = decode(plan, params, edge, clouds[seed])
    assert_whose(done, edge, target, params)
    if not plan.is_gated:
        assert (done.token_ids, done.finish_reason) == reference.plain(target, PROMPT_IDS, params)
    assert all(record.num_draft for record in done.records if record.outcome == "verified")  # a turn is one call
    texts = [*PROMPT_IDS, *done.token_ids]
    for turn in turns_of(done):
        own = [
            reference.next_token(edge, texts[: len(PROMPT_IDS) + base], len(PROMPT_IDS), params) == texts[2 + base]
            for base in turn
        ]
        wanted = plan.back.agreed
        is_over = any(all(own[end - wanted : end]) for end in range(wanted, len(own) + 1))
        assert is_over or not turn or turn[-1] + 1 == len(done.token_ids)
    read = [agrees for each in done.rounds_so_far for agrees in each.block.read]
    written = sum(record.num_committed for record in done.records if record.outcome == "written")
    assert len(read) <= written + len(turns_of(done))  # each of the target's tokens once; a round may have several


def test_the_draft_model_drafts_ahead_while_the_target_writes() -> None:
    """With a step that takes half as long as the target's, about every other token comes as an accepted draft."""
    params, slow = DecodingParams(max_new_tokens=40, min_new_tokens=40), waiting(toys.toy(4), lambda: time.sleep(0.02))
    with serving(slow) as server, closing(skydraft.connect(server.address)) as cloud:
        generation = decode(RACE, params, waiting(toys.toy(4), lambda: time.sleep(0.01)), cloud)
        assert (generation.token_ids, generation.finish_reason) == reference.plain(toys.toy(4), PROMPT_IDS, params)
    assert generation.origins.count("accepted") > 8 and len(generation.records) < 32
    assert_consistent(generation, params)


def test_a_text_that_is_closed_before_its_first_draft_leaves_no_sequence(clouds: dict[int, Any]) -> None:
    edge = toys.toy(4, kind=Watched)
    with edge.floor:  # which its thread waits for
        generation = skydraft.generate(PROMPT, edge=edge, cloud=clouds[4], plan=RACE, raw=True)
        next(iter(generation))
        time.sleep(0.05)
        generation.close()
    Serving.wait_until(lambda: not any(each.name == "skydraft drafts" for each in threading.enumerate()))
    assert not edge.num_open


def test_the_servers_context_ends_the_text_where_it_would_in_one_process() -> None:
    params = DecodingParams(max_new_tokens=100, min_new_tokens=100)
    with serving(open_toy("toy", context_len=40)) as server, closing(skydraft.connect(server.address)) as cloud:
        edge = open_toy("toy:drift=0.1")
        for plan in (make_plan(k=5), make_plan("cloud"), make_plan(k=12)):
            remote = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=params).run()
            assert remote.finish_reason == "length"
            assert remote.num_prompt_tokens + len(remote.token_ids) == 40
