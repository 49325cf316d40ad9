"""What is public stays: the present is compared with the list of the last release.

After an addition there is nothing to do. What is removed or changed on purpose stands in a table of
docs/stability.md, and in CHANGELOG.md. ``python tests/public_list.py`` shows the difference.
"""

from __future__ import annotations

import pytest
from public_list import PAGE, ROOT, announced, breaks, public_list, released

REMOVED = "Removed or changed"
DEPRECATED = "Deprecated"


@pytest.fixture(scope="module")
def now() -> dict[str, str]:
    return public_list()


def test_nothing_public_is_removed_or_changed_unannounced(now: dict[str, str]) -> None:
    version, before = released()
    known = tuple(announced().get(REMOVED, []))
    found = [line for line in breaks(before, now) if not any(key in line for key in known)]
    assert found == [], f"since {version}; announce it in {PAGE.name} and CHANGELOG.md"


def test_what_is_announced_is_true(now: dict[str, str]) -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    tables = announced()
    assert all(key in now for key in tables.get(DEPRECATED, [])), "it is gone: move it"
    for key in [item for table in (REMOVED, DEPRECATED) for item in tables.get(table, [])]:
        assert f"`{key.split(' ')[-1]}`" in changes, f"CHANGELOG.md doesn't mention {key}"


def test_the_list_has_every_kind(now: dict[str, str]) -> None:
    assert now["parameter: duoka.plan(fleet)"] == "required, positional"
    assert now["name: duoka.errors.FleetError"] == "exception DuokaError"
    assert now["option: duoka plan --gpus"] == "GPUS"
    assert "choice: duoka plan --dtype bfloat16" in now
    assert now["exit code of: FleetError"] == "3"
    assert "exit code: 130" in now
    assert "environment: DUOKA_CACHE" in now
    assert now["json: plan.schema.json .format"] == '{"const":"duoka.plan"} required'
    assert "json: duoka doctor --json Finding .advice" in now
    assert "json: duoka gpus --json budget_bytes" in now
    assert now["metric: vllm:num_requests_running"] == "gauge by model_name, engine"
    assert "route: POST /v1/chat/completions" in now
    assert now["request field: /v1/chat/completions messages"] == "required"
    assert now["program: duoka"] == "duoka.cli:main"
    assert "fixture: assert_device_safe" in now
    assert "run: metrics.jsonl" in now


def test_what_breaks() -> None:
    old = {"name: duoka.f": "function", "option: duoka plan --a": "N", "exit code: 3": ""}
    new = {**old, "option: duoka plan --b": "flag", "parameter: duoka.f(b)": "keyword, default 1"}
    new |= {"name: duoka.g": "function", "parameter: duoka.g(a)": "required, positional"}
    assert breaks(old, new) == []
    new |= {"option: duoka plan --a": "flag", "parameter: duoka.f(a)": "required, positional"}
    del new["exit code: 3"]
    assert breaks(old, new) == [
        "removed: exit code: 3 ()",
        "changed: option: duoka plan --a (N → flag)",
        "required: parameter: duoka.f(a)",
    ]
