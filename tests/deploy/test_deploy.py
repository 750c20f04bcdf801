"""The files for containers name what there is: commands, options, extras and metrics. Nothing is built here."""

import json
import re
import tomllib
from typing import Any

import click
import pytest
import yaml

from skydraft.access.limits import Limits
from skydraft.cli.gateway import gateway
from skydraft.cli.main import cli
from skydraft.cli.serve import serve
from skydraft.cloud.metrics import Metrics
from skydraft.cloud.worker import Worker
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudError
from skydraft.gateway.desk import Desk, GatewayMetrics

from ..gateway.running import toy_pair
from ..serving import serving
from ..starting import ROOT

DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
COMPOSE: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"] == "skydraft"}


def test_the_image_installs_extras_that_there_are() -> None:
    (named,) = re.findall(r"'\.\[(.*)\]'", CONTAINERFILE)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(named.split(",")) <= set(known)
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    assert CONTAINERFILE.index("USER skydraft") < CONTAINERFILE.index("ENTRYPOINT")


def test_the_image_s_health_check_asks_the_server_whether_it_answers() -> None:
    (text,) = re.findall(r"^    CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    program, option, code = json.loads(text)
    assert (program, option) == ("python", "-c") and "localhost:7373" in code
    with serving(open_toy("toy")) as server:
        asks = code.replace("localhost:7373", server.address).replace("timeout_s=3", "timeout_s=0.5")
        exec(asks)
    with pytest.raises(CloudError):
        exec(asks)


@pytest.mark.parametrize("name", OURS)
def test_services_are_commands_with_options_that_there_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = OURS[name]
    command = cli.commands[service["command"][0]]
    known = {param.envvar: param for param in command.params if isinstance(param, click.Option)}
    for variable, value in service["environment"].items():
        assert variable in known, variable
        monkeypatch.setenv(variable, re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(value)))
    context = command.make_context(name, [], **cli.context_settings)  # every value is of its option's kind
    assert context.params["host"] == "0.0.0.0"
    assert command in (serve, gateway)


def test_the_scraped_targets_are_services_on_their_ports() -> None:
    scraped: Any = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {target for job in scraped for each in job["static_configs"] for target in each["targets"]}
    port = OURS["target"]["environment"]["SKYDRAFT_SERVE_METRICS_PORT"]
    assert targets == {f"{name}:{port if name == 'target' else 8137}" for name in OURS}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    desk = Desk(pair := toy_pair(), 1, 1)
    told = GatewayMetrics(desk, pair).text().decode()
    for metric in Metrics("toy", Worker(open_toy("toy"), Limits()).docket, {}).collect():
        told += "".join(f"{sample.name} " for sample in metric.samples) + f"{metric.name} {metric.name}_total "
    desk.close()
    known = {name.removesuffix("_created") for name in re.findall(r"skydraft\w+", told)}
    known |= {f"{name}_total" for name in known} | {f"{name}_bucket" for name in known}
    dashboard: Any = json.loads((DEPLOY / "grafana" / "dashboards" / "skydraft.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"skydraft\w+", expression)}
    assert len(asked) > 15 and asked <= known, asked - known
