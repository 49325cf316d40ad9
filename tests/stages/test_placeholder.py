from __future__ import annotations

import pytest
import torch

from duoka.errors import ModelError
from duoka.stages.placeholder import AroundBlocks, Placeholder, is_elsewhere

CPU = torch.device("cpu")


def placeholder(*sizes: int) -> Placeholder:
    return Placeholder.of(torch.empty(sizes, device="meta"), CPU)


def test_what_is_computed_from_one_is_one() -> None:
    with AroundBlocks():
        value = placeholder(2, 3)
        results = [
            value + 1,
            torch.ones(2, 3) * value,
            value.transpose(0, 1),
            value[:, None].sum(2),
        ]
        assert all(map(is_elsewhere, results))
        assert [tuple(result.shape) for result in results] == [(2, 3), (2, 3), (3, 2), (2, 1)]
        assert {result.device for result in results} == {CPU}


def test_what_is_made_on_its_device_is_real() -> None:
    with AroundBlocks():
        positions = torch.arange(3, device=placeholder(2, 3).device)
        assert positions.tolist() == [0, 1, 2]


def test_parameters_of_other_processes_count_as_placeholders() -> None:
    weight = torch.nn.Parameter(torch.empty(5, 4, device="meta"))
    with AroundBlocks():
        rows = weight[torch.tensor([1, 2])]
        assert is_elsewhere(rows)
        assert rows.shape == (2, 4)


def test_it_can_be_written_to_and_nothing_else_by_it() -> None:
    with AroundBlocks():
        value = placeholder(2, 3)
        value += 1
        value[0] = torch.ones(3)
        assert isinstance(value, Placeholder)
        with pytest.raises(ModelError, match="reads values of another stage"):
            torch.zeros(2, 3).add_(value)


@pytest.mark.parametrize(
    "read", [lambda value: value.sum().item(), bool, lambda value: value.tolist(), torch.nonzero]
)
def test_values_are_refused(read: object) -> None:
    with AroundBlocks(), pytest.raises(ModelError, match="reads values of another stage"):
        read(placeholder(1))  # type: ignore[operator]


def test_paused() -> None:
    mode = AroundBlocks()
    with mode:
        with mode.paused():
            assert torch.ones(2).sum().item() == 2
        assert is_elsewhere(placeholder(1) * 2)
