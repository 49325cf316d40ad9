"""peft's layers take the place of blocks: they compute on the block's device."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from duoka import virtual
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.classes import MOVER
from duoka.runtime.dispatch.dispatch import dispatch, undispatch

from .test_dispatch import glm, tokens

TIED = Placement(
    entries=(
        *((name, "vgpu:0") for name in ("model.embed_tokens", "lm_head", "model.rotary_emb")),
        *((f"model.layers.{index}", f"vgpu:{index // 2}") for index in range(4)),
        ("model.norm", "vgpu:1"),
    )
)
CONFIGS = {
    "token-indices": {"trainable_token_indices": [7]},
    "token-indices-of-both": {"trainable_token_indices": {"embed_tokens": [7], "lm_head": [7]}},
    "saved-head": {"modules_to_save": ["lm_head"]},
    "saved-embedding-tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding-and-head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


@pytest.fixture(autouse=True)
def _three_gpus() -> None:
    virtual.set_gpus([None, None, None])


def tied() -> Any:
    return glm(tie_word_embeddings=True)


def losses(model: Any, options: dict[str, Any]) -> list[float]:
    """Two steps of training, the adapted model, and the model that it is merged into."""
    torch.manual_seed(1)
    config = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
    learnt = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learnt, lr=0.5)
    ids = tokens().cpu()
    found = []
    for _ in range(2):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    with torch.no_grad():
        found.append(adapted(input_ids=ids, labels=ids).loss.item())
        merged = adapted.merge_and_unload()
        found.append(merged(input_ids=ids, labels=ids).loss.item())
    return found


@pytest.mark.filterwarnings("ignore")  # peft's own, of ties
@pytest.mark.parametrize("case", CONFIGS)
def test_a_tied_model_that_is_spread_learns_alike(case: str) -> None:
    expected = losses(tied(), CONFIGS[case])
    model = dispatch(tied(), TIED)
    assert losses(model, CONFIGS[case]) == pytest.approx(expected, rel=1e-4)
    undispatch(model)
    assert not any(MOVER in vars(module) for module in model.modules())


def test_what_takes_the_place_of_a_block_moves_its_arguments() -> None:
    model = dispatch(glm(), TIED)
    model.lm_head = nn.Linear(32, 97, bias=False, device="vgpu:0")
    assert model(tokens().to("vgpu:1")).logits.device == torch.device("vgpu:1")
