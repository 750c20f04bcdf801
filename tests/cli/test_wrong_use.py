"""Wrong use of every command is one line on stderr that says what is wrong, nothing on stdout, and exit status 2."""

import shlex
from pathlib import Path

import pytest

from .conftest import Refused
from .test_commands import SMALL

CLIP = Path(__file__).parents[2] / "data" / "speech_zh_heldout" / "demo-fast-loud-woman.flac"
TOYS = "--edge-model toy:drift=0.4 --cloud-model toy"
EDGE = "--edge-model toy:drift=0.2"
GENERATE, OVER, CAPTION = f"generate 你好 {TOYS}", f"generate 你好 {EDGE} --cloud localhost:1", f"caption {CLIP}"
COMPARE = f"compare --prompts {CLIP.parents[1] / 'prompts_zh_dev.jsonl'} --edge-model toy --modes edge"

WRONG = {
    "generates": "No such command",
    # prompts
    f"generate '' {TOYS}": "prompt is empty",
    f"generate \udcff {TOYS}": "not valid UTF-8",
    f"generate {'你好' * 3000} {TOYS}": "12000 tokens",
    f"{GENERATE} --system ''": "system message is empty",
    f"{GENERATE} --raw --system x": "--raw",
    # models
    "generate 你好 --edge-model qwen2.5-coder-0.5": SMALL,
    "generate 你好 --edge-model nowhere.gguf": "nowhere.gguf",
    "generate 你好 --edge-model 'evil\x1b]0;owned\x07\nskydraft: all is well'": "all is well",
    f"{GENERATE} --context 2": "--context",
    f"{GENERATE} --threads 99999": "--threads 0 to 512",
    f"{GENERATE} --device edg=cuda": "'edg=cuda' names another side than edge and cloud",
    f"generate 你好 {EDGE} --cloud=-": "'-' is not the address of a server",
    # what is written, and who checks it
    f"{GENERATE} --k 0": "--k must be",
    f"{GENERATE} --mode qualty": "Did you mean quality?",
    f"{GENERATE} --mode auto": "skydraft calibrate",
    f"{GENERATE} --temperature warm": "warm",
    f"{GENERATE} --stop ''": "--stop must be texts, none of them empty",
    f"{GENERATE} --stop \udcff": "not valid UTF-8",
    f"{GENERATE} --execution fast": "--execution",
    f"{GENERATE} --trace /no/such/folder/t.jsonl": "/no/such/folder",
    f"{GENERATE} --speed 9": "--speed",
    # clouds
    f"{OVER} --cloud-model toy": "choose one",
    f"{OVER} --cloud-timeout -1": "seconds",
    f"{OVER} --max-cost 1": "for servers without skydraft",
    f"{OVER} --tls-ca /nonexistent": "cannot be read",
    f"{OVER} --cloud-token-file /nonexistent": "cannot be read",
    f"generate 你好 {EDGE} --cloud nonsense:port": "not a port",
    f"generate 你好 {EDGE} --cloud 127.0.0.1:9,": "'' is not the address of a server",
    "generate 快 --local-only --cloud a:7373": "--cloud",
    # audits
    f"{GENERATE} --audit-share 0": "above 0",
    f"{GENERATE} --audit-share nan": "above 0",
    f"generate 你好 {EDGE} --cloud http://localhost:1/v1 -m fluency --audit-share 1": "does not apply to a server",
    f"gateway --edge-only {EDGE} --audit-share 0.1": "another option needs one",
    # what is learned
    f"{GENERATE} --learn {CLIP}": "cannot be kept in",
    # recordings
    f"generate --audio {CLIP} --edge-model toy --mode edge": "takes no audio",
    "generate --audio nothing.wav --edge-model toy --mode edge": "no readable file",
    "generate --edge-model toy --mode edge": "Give a prompt, or a recording (--audio)",
    "caption": "FILES",
    f"{CAPTION} --cloud localhost:1": "--share-audio features, or use --mode edge",
    f"{CAPTION} --system ''": "system message is empty",
    f"{CAPTION} -m edge --edge-model toy --out /dev/null/x.csv": "/dev/null/x.csv",
    f"{CAPTION} --edge-model not-looked-for --out a.csv.gz": ".csv or .jsonl",
    # models by name
    "models fetch": "NAME",
    "models fetch tiny-omni-edge": "comes with skydraft",
    "models remove tiny-omni-edge": "comes with skydraft",
    "models remove qwen2.5-coder-0.5": f"Did you mean {SMALL}",
    f"models fetch {SMALL} gpt-9": "no known model 'gpt-9'",
    f"models fetch {SMALL} --source mirror": "mirror",
    "models path gpt-9": SMALL,
    # servers
    "serve --model toy --port 0 --tls-cert x": "Give two files",
    "serve --model toy --tls-key x": "--tls-key needs --tls-cert",
    f"gateway {TOYS} --tls-key x": "--tls-key needs --tls-cert",
    "serve --model toy --port 0 --host 0.0.0.0": "unencrypted",
    "serve --model toy --port 0 --token-file /nonexistent": "cannot be read",
    "serve --model toy --port 0 --max-sessions 0": "must be positive",
    "serve --model toy --port 99999": "0<=x<=65535",
    f"gateway {TOYS} --host 0.0.0.0": "API key is required",
    f"gateway {TOYS} --parallel 0": "--parallel",
    f"gateway {TOYS} --allow-origins '*'": "'*' is not the origin",
    f"gateway {TOYS} --edge-only": "--edge-only",
    f"gateway {TOYS} --tls-cert nowhere": "belong together",
    f"gateway {TOYS} --api-key-file /nowhere": "cannot be read",
    f"gateway {TOYS} --temperature -1": "--temperature",
    # comparisons
    "compare": "--prompts",
    f"{COMPARE} --modes edge,turbo": "no mode 'turbo'",
    f"compare --prompts missing.txt {TOYS}": "missing.txt cannot be read",
    f"{COMPARE} --calibration missing.json": "missing.json cannot be read",
    f"{COMPARE} --limit 0": "--limit",
    f"{COMPARE} --emulate-rtt -1": "--emulate-rtt",
    **{f"{COMPARE} --emulate-rtt 10 {where}": "--emulate-rtt slows the link to one server on this machine"
       for where in ("", "--cloud a.example", "--cloud localhost:1,localhost:2", "--cloud http://[::1]/")},
    "report nowhere": "nowhere/records.jsonl cannot be read",
    # grammars
    f"{GENERATE} --regex (a": "unclosed",
    f"{GENERATE} --json-schema nosuch.json": "cannot be read",
    f"{GENERATE} --json-schema '{{\"type\": '": "not JSON",
    f"{GENERATE} --grammar [0-9]+": "begins with its kind",
    f"{GENERATE} --regex a --grammar regex:b": "beside another",
    f"{GENERATE} --regex a --style zh-short": "--sentences",
    f"{GENERATE} --regex {'a' * 70_000}": "65536",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=lambda words: words[:60])
def test_wrong_use_is_one_clear_line_and_makes_nothing(
    refused: Refused, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--regex" in words or "--grammar" in words:
        pytest.importorskip("llguidance")
    monkeypatch.chdir(tmp_path)
    refused(*shlex.split(words), says=WRONG[words])
    assert not [path for path in tmp_path.iterdir() if path.name != "home"]


def test_a_failure_has_exit_status_1(refused: Refused) -> None:
    refused("models", "fetch", SMALL, "--offline", says=f"skydraft models fetch {SMALL}", status=1)
    refused("generate", "你好", "--offline", says="qwen2.5-coder", status=1)
    refused("generate", "快", "--local-only", "--edge-model", "a/b", says="a/b", status=1)
    away = shlex.split(f"generate 你好 {EDGE} --require-cloud --cloud 127.0.0.1:9 --cloud-timeout 0.3")
    refused(*away, says="did not answer", status=1)
    refused(*away, says="doctor --cloud 127.0.0.1:9", status=1)
