"""A grammar may come from anybody: what would take long, much memory or the process itself is refused soon."""

import json
import resource
import time
from typing import Any

import pytest

from skydraft import DecodingParams, grammars
from skydraft.choosing.chooser import Chooser
from skydraft.engines.toy import open_toy
from skydraft.errors import GrammarRefused

pytest.importorskip("llguidance")


def deep(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


def all_of(*schemas: Any) -> str:
    return json.dumps({"type": "string", "allOf": [*schemas]})


REFUSED = {
    "a megabyte": "json_schema:" + json.dumps({"enum": ["x" * 100] * 10_000}),
    "10,000 deep": "json_schema:" + deep(10_000),
    "100 deep": "json_schema:" + deep(100),
    "10,000 groups": "regex:" + "(" * 10_000 + "a" + ")" * 10_000,
    "many patterns at once": "json_schema:" + all_of(*({"pattern": f".*{number}.*"} for number in range(40))),
    "many intersections": "lark:start: A\nA: " + " & ".join(f"/.*{number}.*/" for number in range(200)),
    "tokens doubled": "lark:start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(200)) + 'R200: "a"',
    "no end of references": 'json_schema:{"$ref":"#"}',
    "a ring of references": 'json_schema:{"$ref":"#/$defs/a","$defs":{"a":{"allOf":[{"$ref":"#/$defs/a"}]}}}',
    "a file": 'json_schema:{"$ref":"file:///etc/passwd"}',
    "a page": 'json_schema:{"$ref":"http://localhost/x.json"}',
    "a special token": "lark:start: <|im_end|>",
    "a feature that is not there": 'json_schema:{"uniqueItems":true,"type":"array"}',
}  # fmt: skip


@pytest.mark.parametrize("grammar", REFUSED.values(), ids=REFUSED)
def test_what_would_take_too_much_is_refused_within_a_second(grammar: str) -> None:
    vocab = open_toy("toy").vocab
    Chooser(DecodingParams(grammar="regex:a"), vocab, 0)  # the vocabulary is known by now
    before, began = _spent(), time.monotonic()
    with pytest.raises(GrammarRefused) as refused:
        Chooser(DecodingParams(grammar=grammar), vocab, 0)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert "backtrace" not in str(refused.value) and "panic" not in str(refused.value)
    assert _spent() - before < 2.5  # of a processor, a child's start included
    assert time.monotonic() - began < 30  # however busy the machine is


def test_a_check_that_could_not_be_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*given: Any, **options: Any) -> Any:
        raise OSError("no memory for it")

    vocab, params = open_toy("toy").vocab, DecodingParams(grammar="regex:(ab){7}")
    with monkeypatch.context() as patch, pytest.raises(GrammarRefused, match="could not be checked"):
        patch.setattr("subprocess.run", no_process)
        Chooser(params, vocab, 0)
    assert Chooser(params, vocab, 0)


def _spent() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in times)


def test_what_is_deep_by_its_rules_does_not_end_the_process() -> None:
    chain = "lark:start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'
    chooser = Chooser(DecodingParams(grammar=chain), open_toy("toy").vocab, 0)
    assert chooser is not None


@pytest.mark.parametrize("text", [
    "", "a", "xml:<a>", "regex", "regex:", "json_schema:[]", "json_schema:3", 'json_schema:{"a":NaN}', "lark: ",
])  # fmt: skip
def test_what_is_no_grammar_is_refused_without_a_library(text: str) -> None:
    with pytest.raises(GrammarRefused):
        grammars.check_grammar(text)
