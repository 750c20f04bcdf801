"""What the gateway counts."""

from __future__ import annotations

import httpx2 as httpx

from .running import gateway


def test_the_metrics_are_those_of_what_happened() -> None:
    with gateway() as running:
        ours = running.chat(max_tokens=20).json()["skydraft"]
        running.chat(model="nope")
        running.chat(temperature=9)
        running.wait_until_idle()
        reply = httpx.get(f"{running.url}/metrics")
        lines = [line for line in reply.text.splitlines() if not line.startswith("#")]
        values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    for origin in set(ours["origins"]):
        assert values[f'skydraft_gateway_tokens_total{{origin="{origin}"}}'] == ours["origins"].count(origin)
    assert values["skydraft_gateway_answers_total"] == values["skydraft_gateway_ttft_seconds_count"] == 1
    assert values['skydraft_gateway_refusals_total{status="404"}'] == 1
    assert values['skydraft_gateway_refusals_total{status="400"}'] == 1
    assert values["skydraft_gateway_running"] == values["skydraft_gateway_waiting"] == 0
    rounds = sum(value for name, value in values.items() if name.startswith("skydraft_gateway_rounds_total"))
    assert rounds == ours["stats"]["num_rounds"]
