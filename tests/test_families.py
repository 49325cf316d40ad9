"""Every family of transformers against one CPU: one test item each, with all checks of `matrix`.

A family's model is built once and its results on the CPU are computed once. Each check takes a copy
of the model; all run, and a failure names each that failed. `make test` takes one family of each
kind, CI the common ones and a twelfth of the others (`turns`), `make nightly` all.
"""

from __future__ import annotations

import warnings
from functools import partial
from types import ModuleType
from typing import Any

import families
import pytest
import towers
from checks import run_all
from families import Family, by_turn
from matrix import agreement, batches, clean, dispatch, engine, losses, one_gpu, paged, stages

from duoka import Workload
from duoka.forecast.profile import Profile
from duoka.tracing import TraceSpec, get_profile

CHECKS = (one_gpu, dispatch, stages, paged, engine, losses, batches, clean, agreement)
# The common families don't even warn there.
WITHOUT_WARNINGS = (dispatch, engine)
IMAGES = ("glm4v", "qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "mllama", "blip-2")
UNSERVED = {name for names in towers.UNSERVED.values() for name in names}
IMAGES_LEFT_OUT = {*UNSERVED, *clean.LEFT_OUT, *clean.IMAGES_LEFT_OUT}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of equal models share a trace, if it holds for all workloads."""
    trace, profiles = get_profile._trace, dict[Any, Profile]()

    def trace_once(
        build: Any, spec: TraceSpec, workload: Workload, *, batched: bool
    ) -> tuple[Profile, bool]:
        key = spec, workload.training, workload.is_paged
        known = profiles.get(key)
        if known is not None and known.answers(workload.batch):
            return known, True
        profile, is_regular = trace(build, spec, workload, batched=batched)
        if is_regular:
            profiles[key] = profile
        return profile, is_regular

    monkeypatch.setattr(get_profile, "_trace", trace_once)


def run(check: ModuleType, family: Family) -> None:
    with warnings.catch_warnings():
        if check in WITHOUT_WARNINGS and family.name in families.FAST:
            warnings.simplefilter("error")
        check.check(family)


@pytest.mark.parametrize("name", by_turn(families.QUICK, families.FAST, families.built_names()))
def test_family(name: str) -> None:
    family = Family(name)
    due = [check for check in CHECKS if name not in getattr(check, "LEFT_OUT", ())]
    run_all({check.__name__.removeprefix("matrix."): partial(run, check, family) for check in due})


@pytest.mark.parametrize(
    "name", by_turn(IMAGES[3:4], IMAGES, set(towers.all_names()) - IMAGES_LEFT_OUT)
)
def test_family_with_images(name: str) -> None:
    clean.check_images(name)


def test_reasons_name_families_that_are_built() -> None:
    left_out = [name for check in CHECKS for name in getattr(check, "LEFT_OUT", ())]
    assert set(left_out) <= set(families.built_names())
