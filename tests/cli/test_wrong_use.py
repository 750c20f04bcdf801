"""What every command refuses: one line on stderr that says why, nothing on stdout, and no file made or changed.

Wrong use has exit status 2; what may be different another time has 1.
"""

import shlex
from pathlib import Path

import pytest

from .conftest import SMALL, Refused

CLIP = Path(__file__).parents[2] / "data" / "speech_zh_heldout" / "demo-fast-loud-woman.flac"
TOYS = "--edge-model toy:drift=0.4 --cloud-model toy"
EDGE = "--edge-model toy:drift=0.2"
GENERATE, OVER, CAPTION = f"generate 你好 {TOYS}", f"generate 你好 {EDGE} --cloud localhost:1", f"caption {CLIP}"
PROMPTS = f"--prompts {CLIP.parents[1] / 'prompts_zh_dev.jsonl'}"
COMPARE = f"compare {PROMPTS} --edge-model toy --modes edge"
STOCK, LEARN = f"generate 你好 {EDGE} --cloud http://localhost:1/v1", f"learn run a {TOYS} --prompts"
# What is in the folder before, and after.
FILES = {
    "kept": "precious", "few.txt": "one\ntwo\n", "half.jsonl": r'{"prompt": "\ud83d"}',
    "code.jsonl": '{"prompt": "a", "check": {"kind": "python", "tests": ""}}',
    "mixed.jsonl": '{"prompt": "a"}\n{"prompt": "b", "check": {"kind": "regex", "pattern": "a"}}\n' * 24,
    "out/records.jsonl": "no last newline", "spoken.jsonl": '{"audio": "a.wav"}\n' * 24,
}  # fmt: skip

WRONG = {
    # prompts
    f"generate '' {TOYS}": "prompt is empty",
    f"generate \udcff {TOYS}": "not valid UTF-8",
    f"generate {'你好' * 3000} {TOYS}": "12000 tokens",
    f"{GENERATE} --system ''": "system message is empty",
    f"{GENERATE} --raw --system x": "--raw",
    # models
    "generate 你好 --edge-model 'evil\x1b]0;owned\x07\nskydraft: all is well'": "all is well",
    f"{GENERATE} --context 2": "--context",
    f"{GENERATE} --threads 99999": "--threads 0 to 512",
    f"{GENERATE} --device edg=cuda": "'edg=cuda' names another side than edge and cloud",
    # what is written, and who checks it
    f"{GENERATE} --mode qualty": "Did you mean quality?",
    f"{GENERATE} --mode auto --trace kept": "skydraft calibrate",
    f"{GENERATE} --stop ''": "--stop must be texts, none of them empty",
    f"{GENERATE} --stop \udcff": "not valid UTF-8",
    f"{GENERATE} --trace /no/such/folder/t.jsonl": "/no/such/folder",
    f"{GENERATE} --speed 9": "--speed",
    f"{GENERATE} --gate nope --trace kept": "nope",
    # clouds
    f"{OVER} --cloud-model toy": "choose one",
    f"{OVER} --cloud-timeout -1": "seconds",
    f"{OVER} --max-cost 1": "for servers without skydraft",
    f"{OVER} --tls-ca /nonexistent": "cannot be read",
    f"generate 你好 {EDGE} --cloud nonsense:port": "not a port",
    "generate 快 --local-only --cloud a:7373": "--cloud",
    f"{OVER} --require-cloud --fallback start": "--require-cloud",
    f"{GENERATE} --drafts a:7374": "--drafts is for a vLLM",
    f"{OVER} --drafts a:7374": "--drafts is for a vLLM",
    f"{STOCK} --drafts http://a:7374/": "--drafts: 'http://a:7374/' is not the address",
    f"{STOCK} --drafts a:port": "--drafts: 'port' is not a port",
    f"{STOCK} --drafts ''": "--drafts: '' is not the address",
    f"{STOCK} --drafts a -m cloud": "--drafts does not apply where one model works alone",
    f"{STOCK} --drafts a -m edge": "--drafts does not apply where one model works alone",
    f"{OVER} --cloud-api vllm": "for servers without skydraft",
    # audits
    f"{GENERATE} --audit-share 0": "above 0",
    f"gateway --edge-only {EDGE} --audit-share 0.1": "another option needs one",
    # what is learned
    f"{GENERATE} --learn {CLIP}": "cannot be kept in",
    f"learn run a {TOYS}": "Give either --prompts FILE or --from DIR",
    f"learn run a/b {PROMPTS} {TOYS}": "cannot be the name of an adapter",
    f"{LEARN} few.txt": "has 2 prompts, but 24 are needed",
    f"{LEARN} mixed.jsonl": "Line 1 of",
    f"{LEARN} spoken.jsonl": "has speech",
    f"{LEARN} half.jsonl": "it has half of a character",
    f"learn forget nobody {TOYS}": "There is nothing to forget",
    f"learn revert nobody {TOYS}": "has no adapter 'nobody'",
    f"learn export nowhere {EDGE}": "nowhere is not a folder",
    # recordings
    "generate --audio nothing.wav --edge-model toy --mode edge": "no readable file",
    "generate --edge-model toy --mode edge": "Give a prompt, or a recording (--audio)",
    f"{CAPTION} --cloud localhost:1": "--share-audio features, or use --mode edge",
    f"{CAPTION} -m edge --edge-model toy --out /dev/null/x.csv": "/dev/null/x.csv",
    f"{CAPTION} --edge-model not-looked-for --out a.csv.gz": ".csv or .jsonl",
    # models by name
    "models fetch tiny-omni-edge": "comes with skydraft",
    "models remove qwen2.5-coder-0.5": f"Did you mean {SMALL}",
    f"models fetch {SMALL} gpt-9": "no known model 'gpt-9'",
    # servers
    "serve --model toy --port 0 --tls-cert x": "Give two files",
    f"gateway {TOYS} --tls-key x": "--tls-key needs --tls-cert",
    "serve --model toy --port 0 --token-file /nonexistent": "cannot be read",
    f"gateway {TOYS} --host 0.0.0.0": "API key is required",
    f"gateway {TOYS} --parallel 0": "--parallel",
    f"gateway {TOYS} --edge-only": "--edge-only",
    f"gateway {TOYS} --port 0 --tls-cert nowhere": "belong together",
    f"gateway {TOYS} --api-key-file /nowhere": "cannot be read",
    # comparisons
    f"compare --prompts missing.txt {TOYS}": "missing.txt cannot be read",
    f"{COMPARE} --emulate-rtt -1": "--emulate-rtt",
    **{f"{COMPARE} --emulate-rtt 10 {where}": "--emulate-rtt slows the link to one server on this machine"
       for where in ("", "--cloud a.example", "--cloud localhost:1,localhost:2", "--cloud http://[::1]/")},
    f"compare --tasks code.jsonl {TOYS} --modes edge": "Add --run-code",
    f"{COMPARE} --cloud-model toy --out out": "records.jsonl",
    f"{COMPARE} --cloud-model toy --out kept": "cannot be written",
    # grammars
    f"{GENERATE} --regex (a": "unclosed",
    f"{GENERATE} --json-schema nosuch.json": "cannot be read",
    f"{GENERATE} --json-schema '{{\"type\": '": "not JSON",
    f"{GENERATE} --regex a --grammar regex:b": "beside another",
    f"{GENERATE} --regex a --style zh-short": "--sentences",
    f"{GENERATE} --regex {'a' * 70_000}": "65536",
}  # fmt: skip


FAILURES = {
    f"models fetch {SMALL} --offline": f"skydraft models fetch {SMALL}",
    "generate 你好 --offline": "qwen2.5-coder",
    "generate 快 --local-only --edge-model a/b": "a/b",
    f"{GENERATE} --json --trace /dev/full": "No space left on device",
    f"{OVER} --require-cloud --cloud-timeout 0.3 --trace kept": "skydraft doctor --cloud localhost:1",
}


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "home" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != ".lock"}


@pytest.mark.parametrize("words", WRONG | FAILURES, ids=lambda words: words[:60])
def test_a_refusal_is_one_line(refused: Refused, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "--regex" in words or "--grammar" in words:
        pytest.importorskip("llguidance")
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    before = contents(tmp_path)
    refused(*shlex.split(words), says=(WRONG | FAILURES)[words], status=1 if words in FAILURES else 2)
    assert contents(tmp_path) == before
