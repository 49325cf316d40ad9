"""Models with real numbers through CUDA's dispatch, on one GPU and over three."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from closeness import close
from cuda_rig.values import values
from safetensors.torch import load_file

import duoka

pytestmark = pytest.mark.cuda_rig(gpus="1GiB,1GiB,1GiB", copy_limit="1GiB")


@pytest.mark.parametrize(
    "fleet",
    [
        "64MiB",
        "64MiB,64MiB,64MiB",
        pytest.param("64MiB,64MiB", marks=pytest.mark.cuda_rig(peers=1), id="peers"),
    ],
)
@pytest.mark.parametrize("name", ["chatglm3-6b-tiny", "glm-4-9b-tiny"])
def test_it_computes_what_the_original_code_did(
    published_data: Path, name: str, fleet: str
) -> None:
    folder = published_data / "reference" / name
    expected = load_file(folder / "reference.safetensors")
    workload = duoka.Workload(prompt_tokens=64, new_tokens=32, dtype="float32")
    plan = duoka.plan(folder, duoka.Fleet.parse(fleet), workload, use_all=True)
    model = duoka.load(plan)
    assert len({parameter.device for parameter in model.parameters()}) == fleet.count(",") + 1
    ids = expected["input_ids"].to("cuda:0")
    with values(most=None), torch.no_grad():
        logits = model(ids).logits
        answer = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert close(logits, expected["logits"])
    assert answer[:, ids.shape[1] :].cpu().equal(expected["greedy.new_ids"][:, :8])
