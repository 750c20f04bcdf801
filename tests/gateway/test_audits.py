"""What clients, operators and the chat page see of audits."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from skydraft.decoding.accounts.audits import Auditor
from skydraft.decoding.target import target_of
from skydraft.engines.toy import open_toy
from skydraft.gateway.pair import Pair

from .running import gateway, toy_pair
from .test_adapters import draft_with


def audited(pair: Pair) -> tuple[Pair, Auditor]:
    auditor = Auditor(pair.edge, target_of(pair.cloud), 1.0, print)  # type: ignore[arg-type]
    return replace(pair, observers=(auditor,), auditor=auditor), auditor


def test_all_can_see_how_far_an_adapter_agrees(tmp_path: Path) -> None:
    pair, auditor = audited(Pair(draft_with(tmp_path), open_toy("toy", 4096, 6)))
    with closing(auditor), gateway(pair) as running:

        def ask(model: str) -> dict[str, object]:
            answer = running.chat("情绪", model=model, max_tokens=64, temperature=0).json()["skydraft"]["stats"]
            auditor.finish()
            return answer  # type: ignore[no-any-return]

        for model in ("skydraft-edge:two", "skydraft-edge"):
            assert ask(model)["audits"] is None
            # An answer may be handed to the auditor after its client has it: on a busy machine a later one tells.
            told_of = next(filter(None, (ask(model)["audits"] for _ in range(5))))
            assert told_of["gate"] == "never"  # type: ignore[index]
        health = running.client.get(f"{running.url}/health").json()
        told = {(each["adapter"], each["gate"]): each for each in health["audits"]["newest"]}
        assert health["audits"]["read"] >= 2 and told["two", "never"]["asked"] == 0.95
        lines = running.client.get(f"{running.url}/metrics").text.splitlines()
        assert f'skydraft_gateway_audits{{outcome="read"}} {health["audits"]["read"]}.0' in lines
        for adapter in ("two", None):
            agreement = float(told[adapter, "never"]["agreement"])
            assert f'skydraft_gateway_audited_agreement{{adapter="{adapter or ""}",gate="never"}} {agreement}' in lines


def test_a_stream_tells_of_earlier_audits_too_and_without_them_nothing_is_said() -> None:
    pair, auditor = audited(toy_pair())
    for given, is_told in ((pair, True), (toy_pair(), False)):
        with gateway(given) as running:
            for _ in range(2):
                text = running.chat("语速", model="skydraft-edge", stream=True).text
                auditor.finish()
            assert ('"audits":{"adapter":null,"gate":"never"' in text) is is_told
            assert ("audits" in running.client.get(f"{running.url}/health").json()) is is_told
    auditor.close()


def test_a_token_that_is_asked_is_no_answer_to_audit() -> None:
    """The first one too, which has nothing before it: a bias holds it, so the target would agree."""
    pair, auditor = audited(toy_pair())
    with closing(auditor), gateway(pair) as running:
        ours = {"logprobs": 5, "continue_ids": [], "continue_as_prompt": True}
        running.chat("语速", model="skydraft-edge", max_tokens=1, logit_bias={"5": 100}, skydraft=ours)
        auditor.finish()
        assert auditor.counts["read"] == 0
