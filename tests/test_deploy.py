"""The files in docker/ and .github/ agree with the program and with each other.

Nothing is started or built here: docs/deploy.md says how the image was tried.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from duoka.cli.serve import ServeOptions
from duoka.report.measured import Fallback
from duoka.serve import limits, server
from duoka.serve.address import Address
from duoka.serve.messages import Status
from duoka.serve.metrics import Metrics

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
DASHBOARDS = sorted((DOCKER / "grafana/dashboards").glob("*.json"))
PORT = Address().port

_METRIC = re.compile(r"\b(?:vllm|duoka):\w+")
_BY = re.compile(r"\bby \(([\w, ]+)\)")


def load(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return load(DOCKER / "compose.yaml")


@pytest.fixture(scope="module")
def prometheus() -> dict[str, Any]:
    return load(DOCKER / "prometheus.yml")


@pytest.fixture(scope="module")
def source() -> dict[str, Any]:
    (found,) = load(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    return found


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """The labels of each sample that the server exports."""
    device = {"cuda:0": 1.0}
    status = Status(
        running=1,
        waiting=1,
        pages=4,
        free_pages=4,
        reserved_bytes={"cuda:0": 1},
        busy_seconds=device,
        busy_shares=device,
        fallbacks=[Fallback("cuda:0", "graphs", "a reason")],
    )
    stage = SimpleNamespace(device="cuda:0", reserved_bytes=1)
    plan = SimpleNamespace(forecast=SimpleNamespace(devices=[stage]))
    settings = SimpleNamespace(plan=plan)
    engine = SimpleNamespace(
        replica=0, state="ready", num_deaths=0, status=status, settings=settings
    )
    pool: Any = SimpleNamespace(engines=[engine])
    metrics = Metrics(pool, "glm")
    metrics.success.labels("glm", "stop").inc()
    metrics.failed(429)
    families = text_string_to_metric_families(metrics.text().decode())
    return {s.name: {*s.labels} for family in families for s in family.samples}


def expressions(dashboard: Path) -> list[tuple[str, str]]:
    """The expressions of all panels, with their legends."""
    return [
        (target["expr"], target["legendFormat"])
        for panel in load(dashboard)["panels"]
        for target in panel.get("targets", ())
    ]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_show_metrics_that_the_server_exports(
    dashboard: Path, samples: dict[str, set[str]]
) -> None:
    found = expressions(dashboard)
    assert len(found) > 20
    for expression, legend in found:
        names = _METRIC.findall(expression)
        assert names, expression
        assert {*names} <= samples.keys(), expression
        labels = set.intersection(*(samples[name] for name in names))
        grouped = {label for by in _BY.findall(expression) for label in by.split(", ")}
        used = grouped | {*re.findall(r"{{(\w+)}}", legend)} | {"model_name"}
        assert used <= labels, expression
        if grouped:  # only these labels are left for the legend
            assert {*re.findall(r"{{(\w+)}}", legend)} <= grouped, expression


def test_a_dashboard_shows_every_metric_of_duoka(samples: dict[str, set[str]]) -> None:
    shown = {
        name
        for dashboard in DASHBOARDS
        for expression, _ in expressions(dashboard)
        for name in _METRIC.findall(expression)
    }
    exported = {name for name in samples if name.startswith("duoka:")}
    # Dashboards show the share of recent time; the seconds are for rates over other times.
    hidden = {"duoka:stage_busy_seconds_total"}
    assert {name for name in exported if not name.endswith("_created")} - hidden <= shown


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_whole(dashboard: Path, source: dict[str, Any]) -> None:
    panels = load(dashboard)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len({*cells}) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    sources = {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"}
    assert sources == {source["uid"]}


def test_services_find_one_another(
    compose: dict[str, Any], prometheus: dict[str, Any], source: dict[str, Any]
) -> None:
    services = compose["services"]
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"duoka:{PORT}"]}]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert {"duoka", "prometheus", "grafana"} == {*services}
    key_file = f"/run/secrets/{services['prometheus']['secrets'][0]}"
    assert job["authorization"] == {"credentials_file": key_file}
    assert services["duoka"]["secrets"] == services["prometheus"]["secrets"]
    assert f"--api-key-file {key_file}" in services["duoka"]["command"]


def test_ports_are_published_to_this_machine_only(compose: dict[str, Any]) -> None:
    ports = {name: service["ports"] for name, service in compose["services"].items()}
    assert ports == {
        "duoka": [f"127.0.0.1:{PORT}:{PORT}"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_what_is_mounted_exists(compose: dict[str, Any]) -> None:
    mounts = {
        target: origin
        for service in compose["services"].values()
        for origin, target in (
            mount.removesuffix(":ro").rsplit(":", 1) for mount in service["volumes"]
        )
    }
    for origin in mounts.values():
        if origin.startswith("."):
            assert (DOCKER / origin).exists(), origin
        else:
            name = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", origin)
            assert name in compose["volumes"], origin
    declared = json.loads(re.findall(r"^VOLUME (.*)", DOCKERFILE, re.M)[0])
    assert {*declared} <= mounts.keys()
    (provider,) = load(DOCKER / "grafana/provisioning/dashboards/duoka.yaml")["providers"]
    assert DOCKER / mounts[provider["options"]["path"]] == DASHBOARDS[0].parent
    settings = compose["services"]["grafana"]["environment"]
    home = settings["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARDS[0].name}"
    # A key must not reach a commit.
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert compose["secrets"]["api_key"]["file"] == "./secrets/api_key"
    assert "/docker/secrets/" in ignored


def test_requests_have_their_time_to_finish(compose: dict[str, Any]) -> None:
    grace = int(compose["services"]["duoka"]["stop_grace_period"].removesuffix("s"))
    assert grace > server._DRAIN_SECONDS + 3 * server._CUT_SECONDS


def test_the_image_starts_and_watches_the_server() -> None:
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)", DOCKERFILE, re.M)[0])
    assert entry == ["tini", "--", "duoka", "serve", "--host", "0.0.0.0"]
    assert "host" in ServeOptions.__dataclass_fields__
    assert re.findall(r"^EXPOSE (\d+)", DOCKERFILE, re.M) == [str(PORT)]
    (probe,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)", DOCKERFILE, re.M)
    code = json.loads(probe)[-1]
    assert f"HTTPConnection('127.0.0.1', {PORT}" in code
    (path,) = re.findall(r"'(/\w+)'", code)
    assert path in limits._KEYLESS_PATHS
    assert re.findall(r"^USER (.*)", DOCKERFILE, re.M) == ["${USER_ID}:${USER_ID}"]


def test_the_image_is_built_from_what_is_here() -> None:
    """Files that the wheel needs are copied, and none of them is left out of the context."""
    copied = {
        path
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M)
        for path in line.split()
    }
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    readmes = re.findall(r'^(?:readme|path) = "(.*)"', text, re.M)
    for pattern in [*readmes, *project["license-files"]]:
        matched = [path.relative_to(ROOT).parts[0] for path in ROOT.glob(pattern)]
        assert matched, pattern
        assert {*matched} <= copied, pattern
    (version,) = re.findall(r"^ARG PYTHON_IMAGE=python:3\.(\d+)-slim", DOCKERFILE, re.M)
    assert int(version) >= 11
    extras = re.findall(r"^ARG EXTRAS=(\w+)", DOCKERFILE, re.M)
    assert {*extras} <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_bounded_and_call_make(path: Path) -> None:
    workflow = load(path)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {*re.search(r"\.PHONY: ((?:.*\\\n)*.*)", makefile)[1].replace("\\", "").split()}
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        assert not str(job["runs-on"]).endswith("latest")
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@(v\d+(\.\d+)*|release/v\d+)", step["uses"])
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
            called = set(re.findall(r"^make ([\w-]+)", step.get("run", ""), re.M))
            assert called <= targets
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in workflow["jobs"].values()]
    assert {name for matrix in matrices for name in matrix.get("target", ())} <= targets
