"""What a person decides: numbers, the key, and further options that mustn't undo the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from duoka.errors import UsageError
from duoka.serve.vllm import VllmOptions

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
        ("--seed", "1"),
        ("--model-impl", "transformers"),
        ("--compilation-config.level", "3"),
        ("--block-size", "32"),
        ("--seed", "-1"),
    ],
)
def test_all_else_is_vllms_own(arguments: tuple[str, ...]) -> None:
    assert VllmOptions(python=PYTHON, arguments=arguments).arguments == arguments


def test_an_option_is_known_however_it_is_written() -> None:
    options = VllmOptions(python=PYTHON, arguments=("--reasoning_parser=glm45",))
    assert options.has("reasoning-parser")
    assert not options.has("quantization")


def test_a_key_is_never_shown() -> None:
    assert "sk-abc123" not in repr(VllmOptions(python=PYTHON, api_key="sk-abc123"))
