"""A chat template is code that came with the model: whatever it does ends soon, in any thread, with one line."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel
from skydraft.prompts.chat_template import BoundedEnvironment, render, render_within
from skydraft.prompts.messages import Message

GROW = "{% set ns = namespace(x='ab', y=[1]) %}{% for i in range(99) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ns.x}}"
ENDLESS = {
    "a macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a tree of loops": "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "repeated": "{{ 'a' * 10**9 }}", "a list": "{{ (range(99999) | list * 99999) | length }}",
    "doubled": GROW.replace("EXPRESSION", "ns.x + ns.x"), "joined": GROW.replace("EXPRESSION", "ns.x ~ ns.x"),
    "replaced": GROW.replace("EXPRESSION", "ns.x.replace('a', 'aaa')"),
    "replaced by a filter": GROW.replace("EXPRESSION", "ns.x | replace('b', 'bb')"),
    "joined by a method": GROW.replace("EXPRESSION", "'a'.join([ns.x, ns.x])"),
    "joined by a filter": GROW.replace("EXPRESSION", "[ns.x, ns.x] | join"),
    "a power": "{{ (9**9**9**9) | string | length }}", "a width": "{{ '%999999999d' % 5 }}",
    "a width that is given": "{{ '%*d' % (999999999, 5) }}", "a format": "{{ '{:>999999999}'.format(1) }}",
    "rjust": "{{ 'a'.rjust(10**9) }}", "center": "{{ 'a' | center(10**9) }}", "indent": "{{ 'a\nb' | indent(10**9) }}",
    "spaces": "{{ messages | tojson(indent=10**9) }}", "words": "{{ lipsum(10**6) }}",
    "a long text in a loop": "{% set x = 'a' * 10**7 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "compared": "{% set x = range(99999) | list %}{% for i in range(99999) %}{% if -1 in x %}{% endif %}{% endfor %}",
    "cut": "{% set x = range(99999) | list %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "sorted": "{% set x = range(99999) | list %}{% for i in range(99999) %}{% set y = x | sort %}{% endfor %}",
    "the budget": "{% set _budget = 5 %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_a_broken_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.prompts.chat_template._MAX_STEPS", 100_000)  # a tenth of the steps, and of the time
    vocab, began = Vocab([b"a"], lambda text: [0], chat_template=ENDLESS[name]), time.process_time()
    # In a thread as in the gateway, where no signal comes.
    with ThreadPoolExecutor(1) as pool, pytest.raises(BrokenModel) as caught:
        pool.submit(render, vocab, [Message("user", "a")]).result()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert time.process_time() - began < 2


SAME = """{% for m in items if m != 'x' -%}
{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}
{%- else %}none{% endfor %}
{% for m in nothing %}{{ m }}{% else %}none{% endfor %}{% for k, v in table.items() %}{{ k ~ v }}{% endfor %}
{{ nothing | default('a') }}{{ nothing is defined }}{{ items[::-1] | join('+') }}{{ items | map('upper') | list }}
{{ 'a' in items and items[0] != 'b' }}{{ '%s-%d' % ('a', 5) }}{{ 2 ** 5 }}{{ 'ab' * 3 }}{{ [1] + [2] }}
{% filter upper %}a{% endfilter %}{% set x %}b{% endset %}{{ x }}{{ (table | dictsort)[0] }}{{ 'a b' | wordwrap(1) }}
{% for a in [[1, [2]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}{{ 'abc'.replace('b', 'x') }}"""


def test_all_else_is_rendered_as_the_sandbox_does() -> None:
    given = {"items": ["a", "x", "b", "c"], "table": {"k": 1, "l": "m"}}
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    bounded = BoundedEnvironment().from_string(SAME)
    assert render_within(bounded, **given) == sandbox.from_string(SAME).render(**given)
