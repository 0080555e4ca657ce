"""The Grafana dashboard and the alerts of the page: queries name metrics and labels that a worker exposes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from inweave.serve.api.native.metrics import device_memory
from inweave.serve.engine.contract import DeviceMemory
from inweave.serve.jobs.figures import Figures
from tests.serve.worker import SMALL, Worker

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text("utf-8"))
#: labels that Prometheus adds to what it reads
ADDED = {"instance", "job"}


def queries() -> list[str]:
    """Return the queries of all panels, and the alerts of the page."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    page = (ROOT / "docs" / "deploying.md").read_text("utf-8").partition("| alert |")[2].partition("##")[0]
    alerts = re.findall(r"`([^`]+)`", page)
    assert len(alerts) == 3
    return [*panels, *alerts]


def selectors(node: Any) -> Iterator[Any]:
    """Yield every selector of a metric in a query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector"):
        if (child := getattr(node, name, None)) is not None and not isinstance(child, str | int | float):
            yield from selectors(child)
    for argument in getattr(node, "args", ()) or ():
        yield from selectors(argument)


def problems_of(query: str, exposed: dict[str, dict[str, set[str]]]) -> list[str]:
    """Return what a query names and the metrics lack: a metric, a label, a value of a label."""
    tree = promql_parser.parse(query.replace("$instance", ".*"))
    problems = []
    grouped = re.findall(r"by \(([^)]*)\)", query)
    for selector in selectors(tree):
        labels = exposed.get(selector.name)
        if labels is None:
            problems.append(f"there is no metric {selector.name}")
            continue
        names = {matcher.name for matcher in selector.matchers.matchers} - ADDED
        names |= {name.strip() for group in grouped for name in group.split(",")} - ADDED
        problems += [f"{selector.name} has no label {name}" for name in sorted(names - labels.keys())]
    return problems


def exposed_by(text: str) -> dict[str, dict[str, set[str]]]:
    """Return the labels of every sample of a scrape, with their values."""
    exposed: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = exposed.setdefault(sample.name, defaultdict(set))
            for name, value in sample.labels.items():
                labels[name].add(value)
    return exposed


@pytest.fixture(scope="module")
def exposed(worker: Worker) -> dict[str, dict[str, set[str]]]:
    """The metrics of a running worker that ran a job, with those that only a GPU and accounts bring."""
    worker.ended(worker.submit(**SMALL))
    figures, registry = Figures(), CollectorRegistry()
    figures.refused("alice", "queued_jobs")

    class Memory(Collector):
        def collect(self) -> Iterator[Any]:
            device: Any = SimpleNamespace(memory=DeviceMemory(1, 2, 3))
            yield from device_memory([device])

    registry.register(Memory())
    more = generate_latest(registry) + generate_latest(figures.registry)
    return exposed_by(more.decode()) | exposed_by(worker.http.get("/metrics").text)


@pytest.mark.parametrize("query", queries())
def test_every_query_names_what_a_worker_exposes(query: str, exposed: dict[str, dict[str, set[str]]]) -> None:
    assert problems_of(query, exposed) == []


def test_states_that_queries_name_exist(exposed: dict[str, dict[str, set[str]]]) -> None:
    states = {
        state for query in queries() for match in re.findall(r'state=~?"([^"]+)"', query) for state in match.split("|")
    }
    assert states <= exposed["inweave_jobs"]["state"]


def test_a_wrong_query_is_seen(exposed: dict[str, dict[str, set[str]]]) -> None:
    assert problems_of("sum by (dev) (rate(inweave_busy_seconds_total[5m]))", exposed)
    assert problems_of('1 - inweave_jobs{status="queued"} / 2', exposed)
    assert problems_of("inweave_busy_seconds", exposed)
    with pytest.raises(ValueError):
        problems_of("sum(", exposed)


def test_every_metric_of_jobs_is_on_the_dashboard(exposed: dict[str, dict[str, set[str]]]) -> None:
    text = json.dumps(DASHBOARD)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed if name.startswith("inweave_")}
    assert {name for name in families if name not in text} == set()


def test_panels_do_not_overlap_and_use_the_chosen_data_source() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        area = panel["gridPos"]
        cells = {
            (x, y) for x in range(area["x"], area["x"] + area["w"]) for y in range(area["y"], area["y"] + area["h"])
        }
        assert not cells & places and area["x"] + area["w"] <= 24
        places |= cells
        sources = {each["datasource"]["uid"] for each in (panel, *panel["targets"])}
        assert sources == {"${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
