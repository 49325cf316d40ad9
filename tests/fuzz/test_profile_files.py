"""Profiles in the cache as a disk, another program or another version may have left them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from fuzzing import damaged, damaged_text, fuzz
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.serialization import from_dict, to_dict
from duoka.errors import FormatError
from duoka.forecast import profile_cache
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload

PROFILE = tiny.made_up([30 * tiny.MIB] * 5, tiny.Costs(cache=512))
WORKLOAD = Workload(dtype="bfloat16")
VALID: dict[str, Any] = json.loads(json.dumps(to_dict(PROFILE)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUOKA_CACHE", str(tmp_path_factory.mktemp("cache")))
        profile_cache.keep_profile(PROFILE, WORKLOAD)
        (written,) = profile_cache.cache_directory().rglob("*.json")
        yield written


@fuzz()
@given(damaged(VALID))
def test_parts_that_were_changed(told: Any) -> None:
    try:
        profile = from_dict(Profile, told)
    except FormatError:
        return
    assert from_dict(Profile, json.loads(json.dumps(to_dict(profile)))) == profile


@pytest.mark.slow
@fuzz()
@given(st.data())
def test_a_damaged_file_is_no_error(file: Path, data: st.DataObject) -> None:
    valid = file.read_text(encoding="utf-8")
    try:
        text = data.draw(damaged_text(valid))
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        found = profile_cache.find_profile(PROFILE.fingerprint, WORKLOAD)
        assert found is None or isinstance(found, Profile)
    finally:
        file.write_text(valid, encoding="utf-8")


@fuzz()
@given(st.binary(max_size=200))
def test_any_bytes(file: Path, content: bytes) -> None:
    valid = file.read_bytes()
    try:
        file.write_bytes(content)
        assert profile_cache.find_profile(PROFILE.fingerprint, WORKLOAD) is None
    finally:
        file.write_bytes(valid)
