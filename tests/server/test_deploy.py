"""deploy/: what Prometheus and Grafana are told fits the server, and fits together. Neither is needed here."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.server.support import Live
from tutorial_engine.server import cli

FOLDER = Path(__file__).resolve().parent.parent.parent / "deploy"
BOARD = json.loads((FOLDER / "grafana" / "dashboards" / "tutorial_engine.json").read_text())
WORDS = {"sum", "max", "rate", "by", "le", "histogram_quantile", "label_values"}  # of PromQL and Grafana, as used here


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def exposed(live: Live) -> dict[str, set[str]]:
    """Sample -> names of its labels, of everything at /metrics."""
    found: dict[str, set[str]] = {}
    for line in live.http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, labels = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", line).groups()
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels or ""))
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]] + [
        variable["query"] for variable in BOARD["templating"]["list"]]


def test_every_metric_and_label_exists(letters: Live) -> None:
    """At a server that has answered something; a name with a typing error would be an empty panel."""
    letters.complete(max_tokens=3)
    known, used = exposed(letters), set()
    for text in expressions():
        names = set(re.findall(r"\b(?:vllm:|http_)\w+", text))
        assert names and names <= known.keys(), (names - known.keys(), text)
        labels = {label.strip() for some in re.findall(r"by \((.*?)\)", text) for label in some.split(",")}
        labels |= set(re.findall(r"(\w+)=~", text)) | set(re.findall(r"label_values\(.*, (\w+)\)", text))
        assert all(labels <= known[name] for name in names), (labels, text)
        rest = re.sub(r"\b(?:vllm:|http_)\w+|\{.*?\}|\[\$__rate_interval\]|by \(.*?\)", "", text)
        assert set(re.findall(r"[a-z_]{2,}", rest)) - labels <= WORDS and text.count("(") == text.count(")"), text
        assert all(("_total" in n or "_bucket" in n or "_sum" in n or "_count" in n) == ("rate(" in text) for n in names
                   if n != "vllm:num_requests_running"), f"counters have rates, gauges have none: {text}"
        used |= names
    legends = [target["legendFormat"] for panel in BOARD["panels"] for target in panel["targets"]]
    assert {word for text in legends for word in re.findall(r"\{\{(\w+)\}\}", text)} <= {
        "finished_reason", "handler", "status"}
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in used}
    assert len(families) >= 14


def test_the_board_is_well_formed() -> None:
    """Ids are unique, panels do not overlap, each says what it shows and asks the source that is set up."""
    (source,) = load("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"] and {t["datasource"]["uid"] for t in panel["targets"]} == {source["uid"]}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        assert (one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"])


def test_the_files_fit_together() -> None:
    """What is mounted exists, Grafana asks the Prometheus of the same file, Prometheus asks the server's port, and
    nobody else can reach them."""
    services = load("docker-compose.yml")["services"]
    mounts: dict[str, str] = {}
    for service in services.values():
        for volume in service["volumes"]:
            source, target, mode = volume.split(":")
            assert (FOLDER / source).exists() and mode == "ro"
            mounts[target] = source
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (FOLDER / mounts[str(home.parent)] / home.name).exists()
    (provider,) = load("grafana/provisioning/dashboards/folder.yml")["providers"]
    assert provider["options"]["path"] == str(home.parent)
    (source,) = load("grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == f"http://prometheus:{services['prometheus']['ports'][0].rpartition(':')[2]}"
    (job,) = load("prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert services["prometheus"]["extra_hosts"] == [f"{host}:host-gateway"] and job["metrics_path"] == "/metrics"
    parser = argparse.ArgumentParser()
    cli.COMMANDS["serve"][1](parser)
    assert parser.get_default("port") == int(port)
    assert source["jsonData"]["timeInterval"] == load("prometheus.yml")["global"]["scrape_interval"]


def test_the_page_names_what_there_is() -> None:
    text = (FOLDER / "README.md").read_text()
    assert all((FOLDER / path).exists() for path in re.findall(r"\]\((?!http)(.*?)\)", text))
    parser = argparse.ArgumentParser()
    cli.COMMANDS["serve"][1](parser)
    flags = set(re.findall(r"`(--[\w-]+)", text))
    assert flags and flags <= {option for action in parser._actions for option in action.option_strings}
