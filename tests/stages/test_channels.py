"""Tensors reach other processes whole, whatever their type, and in any order of messages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from duoka.stages.channels import LocalChannel, TensorMessage
from duoka.stages.rendezvous import Rendezvous
from duoka.workers.group import WorkerGroup

CPU = torch.device("cpu")
MESSAGES = [
    TensorMessage(0, 1, transfer, batch, False) for batch in range(2) for transfer in range(3)
]
WORKER = """
import json, sys
import torch, torch.distributed as dist
from duoka.stages.channels import ProcessChannel, TensorMessage
from duoka.workers.worker import end_with_parent
end_with_parent()
dist.init_process_group("gloo")
rank = dist.get_rank()
channel = ProcessChannel([0, 1, 0], torch.device("cpu"))
dtypes = [torch.float32, torch.bfloat16, torch.bool]
def value(transfer, batch):
    return (torch.arange(5) * (transfer + 1) + batch).to(dtypes[transfer])
numbers = [(transfer, batch) for batch in range(2) for transfer in range(3)]
forward = [TensorMessage(0, 1, *number, False) for number in numbers]
back = [TensorMessage(0, 1, transfer, 0, True) for transfer in range(2)]
if rank == 0:
    for message in forward:
        channel.send(message, value(message.transfer, message.micro_batch))
    results = [channel.receive(m, (5,), dtypes[m.transfer]) for m in reversed(back)]
    right = all(r.equal(value(m.transfer, 7)) for r, m in zip(results, reversed(back)))
    own = TensorMessage(0, 2, 9, 0, False)
    channel.send(own, torch.ones(2))
    right &= channel.receive(own, (2,), torch.float32).equal(torch.ones(2))
else:
    results = [channel.receive(m, (5,), dtypes[m.transfer]) for m in reversed(forward)]
    right = all(
        r.equal(value(m.transfer, m.micro_batch)) for r, m in zip(results, reversed(forward))
    )
    for message in back:
        channel.send(message, value(message.transfer, 7))
channel.flush()
open(sys.argv[1] + f"/{rank}", "w").write(json.dumps(right))
dist.destroy_process_group()
"""


def test_within_a_process_both_sides_have_their_own() -> None:
    channel = LocalChannel([CPU, CPU])
    sent = torch.ones(3)
    channel.send(MESSAGES[0], sent)
    received = channel.receive(MESSAGES[0], (3,), torch.float32)
    received += 1
    assert sent.equal(torch.ones(3))


@pytest.mark.dist
def test_between_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "channel_worker.py").write_text(WORKER)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    rendezvous = Rendezvous()
    with WorkerGroup(
        "channel_worker", 2, [str(tmp_path)], environment=rendezvous.environment
    ) as workers:
        assert workers.wait() == {}
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [True, True]
