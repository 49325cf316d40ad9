"""What a person decides: numbers, the key, and further options that mustn't undo the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duoka.errors import UsageError
from duoka.serve.vllm import VllmOptions
from duoka.serve.vllm.options import read_key

PYTHON = Path("python")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pipeline-parallel-size", "3"),
        ("--pipeline_parallel_size=3",),
        ("--pipeline-parallel", "3"),
        ("-pp", "3"),
        ("-tp=2",),
        ("-n2",),
        ("--data-parallel-rank", "1"),
        ("-dpr", "1"),
        ("-pcp", "2"),
        ("--enforce-eager", "--kv-cache-memory-bytes", "1G"),
        ("--api-key", "secret"),
        ("--api_key=secret",),
        ("--conf", "options.yaml"),
        ("--headless",),
        ("--max-model-len=10",),
    ],
)
def test_what_the_plan_decides_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="can't be given to vLLM here") as error:
        VllmOptions(python=PYTHON, arguments=arguments)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--enforce-eager",),
        ("--trust-remote-code", "--quantization", "awq"),
        ("--served-model-name", "glm"),
        ("--model-impl", "transformers"),
        ("--compilation-config.level", "3"),
        ("--block-size", "32"),
        ("--seed", "-1"),
    ],
)
def test_all_else_is_vllms_own(arguments: tuple[str, ...]) -> None:
    assert VllmOptions(python=PYTHON, arguments=arguments).arguments == arguments


def test_an_option_is_known_however_it_is_written() -> None:
    options = VllmOptions(python=PYTHON, arguments=("--served_model_name=glm",))
    assert options.has("served-model-name")
    assert not options.has("quantization")


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 65536},
        {"master_port": 0},
        {"start_seconds": 0},
        {"drain_seconds": -1},
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        VllmOptions(python=PYTHON, **options)
    assert str(next(iter(options.values()))) in str(error.value)


def test_a_key_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("\n  sk-abc123  \n\n")
    assert read_key(path) == "sk-abc123"
    assert read_key(None) is None


@pytest.mark.parametrize("text", ["", "\n", "a\nb\n", "a b", "schlüssel", "a\x00b", "x" * 5000])
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as error:
        read_key(path)
    assert str(path) in str(error.value)
    assert text.strip() == "" or text not in str(error.value)


def test_a_file_that_cant_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_key(tmp_path / "nothing")
    with pytest.raises(UsageError, match="can't be read"):
        read_key(tmp_path)
