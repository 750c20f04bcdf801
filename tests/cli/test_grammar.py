"""--json-schema, --regex and --grammar: the text follows them, and what is wrong is one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .conftest import Refused

pytest.importorskip("llguidance")
TOYS = ("--edge-model", "toy:drift=0.2", "--cloud-model", "toy", "--quiet")
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def test_the_text_fits_the_schema_given_as_a_file_or_as_it_is_and_the_pattern(invoke: Any, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for given in (str(file), json.dumps(SCHEMA), " " + json.dumps(SCHEMA)):
        status, out, err = invoke("generate", "你好", *TOYS, "-n", "300", "--json-schema", given)
        assert status == 0 and isinstance(json.loads(out)["ok"], bool), err
    for flags in (["--regex", "2[0-9]{3}"], ["--grammar", 'lark:start: "2" /[0-9]{3}/']):
        status, out, err = invoke("generate", "你好", *TOYS, *flags)
        assert status == 0 and re.fullmatch("2[0-9]{3}\n", out), err


@pytest.mark.parametrize(("flags", "said"), [
    (["--regex", "(a"], "unclosed"), (["--json-schema", "nosuch.json"], "cannot be read"),
    (["--json-schema", '{"type": '], "not JSON"), (["--grammar", "[0-9]+"], "begins with its kind"),
    (["--regex", "a", "--grammar", "regex:b"], "beside another"),
    (["--regex", "a", "--style", "zh-short"], "--sentences"), (["--regex", "a" * 70_000], "65536"),
])  # fmt: skip
def test_what_is_wrong_with_a_grammar_is_one_line(refused: Refused, flags: list[str], said: str) -> None:
    refused("generate", "你好", *TOYS, *flags, says=said)
