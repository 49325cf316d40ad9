"""Models that see, fine-tuned with pictures: as one device does it, and as the original code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tuning
from closeness import close
from image_checkpoints import write_family, write_glm4v
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import duoka
from duoka import Checkpoint, Constraints, TuneSettings, Workload
from duoka.errors import UsageError
from duoka.tuner import part as part_module
from duoka.tuner.data import Batches, Dataset
from duoka.tuner.layout import Layout
from duoka.tuner.part import ModelPart
from duoka.tuner.run import RunDirectory
from duoka.tuner.trainer import Trainer
from duoka.tuner.tune import TuneResult, export_result, resume

SETTINGS: dict[str, Any] = {"batch": 4, "lr": 1e-2, "epochs": 2}
FAMILIES = ("llava", "qwen2_vl", "glm4v", "gemma3", "internvl")
TOWERS = ("vision", "visual", "multi_modal_projector")
ONE = "virtual:256MiB"
PIXELS = 56
ANSWER = {"role": "assistant", "content": "red"}
SURE = {"role": "user", "content": "Sure?"}
ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "<image>What?"}, ANSWER],
        "images": ["photos/0.png"],
    },
    {"messages": [{"role": "user", "content": "Why?"}, ANSWER]},
    {
        "messages": [{"role": "user", "content": "<image>\n<image>Which?"}, ANSWER, SURE, ANSWER],
        "images": ["photos/1.png", "photos/2.png"],
    },
    {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B"}]},
    {
        "image": "photos/1.png",
        "conversations": [
            {"from": "human", "value": "<image>\nSee?"},
            {"from": "gpt", "value": "green"},
        ],
    },
]
Models = Callable[[str], Path]
Run = Callable[..., TuneResult]


def write_model(name: str, directory: Path) -> Path:
    return write_glm4v(directory) if name == "glm-4v" else write_family(name, directory)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    written: dict[str, Path] = {}

    def model(name: str) -> Path:
        if name not in written:
            written[name] = write_model(name, tmp_path_factory.mktemp(name))
        return written[name]

    return model


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows with one picture, two and none."""
    (tmp_path / "photos").mkdir()
    for number in range(3):
        picture = Image.effect_noise((PIXELS, PIXELS + number), 90)
        picture.save(tmp_path / f"photos/{number}.png")
    return write_rows(tmp_path / "rows.jsonl", *ROWS)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def run(
    models: Models, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_start: None
) -> Run:
    def tune(
        family: str, gpus: str = ONE, name: str = "run", plan: Any = None, **more: Any
    ) -> TuneResult:
        replicas = more.pop("replicas", "auto")
        settings = TuneSettings(**{**SETTINGS, **more})
        is_alone = "x" not in gpus and (plan is None or len(plan.devices) == 1)
        with tuning.one_process(monkeypatch) if is_alone else monkeypatch.context():
            return duoka.tune(
                models(family),
                str(data),
                gpus,
                save=tmp_path / name,
                settings=settings,
                replicas=replicas,
                plan=plan,
            )

    return tune


def is_in_tower(name: str) -> bool:
    return any(part.startswith(TOWERS) for part in name.split("."))


def assert_as_alone(run: Run, family: str, gpus: str, **more: Any) -> None:
    expected = torch.tensor(tuning.losses(run(family, name="alone", **more).directory))
    assert len(expected) == 4
    assert expected[2] < expected[0]
    spread = run(family, gpus, name="spread", **{"replicas": 1, **more})
    assert close(torch.tensor(tuning.losses(spread.directory)), expected)
    assert spread.report is not None
    for device in spread.report.devices:
        # Every process computes masks and positions for itself.
        assert device.allocated_bytes <= device.forecast_allocated_bytes * 1.001 + 2**14


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_stages_learn_what_one_device_learns(family: str, run: Run) -> None:
    assert_as_alone(run, family, "virtual:2x64MiB")


def test_three_stages_learn_what_one_device_learns(run: Run) -> None:
    assert_as_alone(run, "glm-4v", "virtual:3x64MiB")


@pytest.mark.slow
def test_replicas_and_micro_batches_of_rows_with_and_without_pictures(run: Run) -> None:
    alone = run("glm-4v", name="alone", micro_batch=2, train_vision=True)
    both = run("glm-4v", "virtual:2x64MiB", replicas=2, micro_batch=2, train_vision=True)
    expected = torch.tensor(tuning.losses(alone.directory))
    assert close(torch.tensor(tuning.losses(both.directory)), expected)
    adapters = [load_file(it.result / "adapter_model.safetensors") for it in (alone, both)]  # type: ignore[operator]
    for name, value in adapters[0].items():
        assert close(adapters[1][name], value, 1e-3), name


@pytest.mark.slow
def test_a_tower_over_two_stages_which_text_alone_skips(
    run: Run, models: Models, data: Path, tmp_path: Path
) -> None:
    """The second of three stages has nothing to do for rows of text."""
    settings = TuneSettings(**SETTINGS, seq_length=96, images=2, image_size=(58, 56))
    workload = settings.workload(Checkpoint.open(models("glm-4v")))
    blocks = "model.vision.transformer.layers"
    front, rest = f"{blocks}.0", ("model.vision.conv", "model.embed_tokens", "model.layers.0")
    pins = ((front, "vgpu:0"), (f"{blocks}.1", "vgpu:1"), (f"{blocks}.2", "vgpu:1"))
    plan = duoka.plan(
        models("glm-4v"),
        "virtual:3x64MiB",
        workload,
        constraints=Constraints(pins=(*pins, *((name, "vgpu:2") for name in rest))),
        use_all=True,
    )
    assert len(plan.devices) == 3
    expected = torch.tensor(tuning.losses(run("glm-4v", name="alone", seq_length=96).directory))
    spread = run("glm-4v", plan=plan, seq_length=96, name="spread")
    assert close(torch.tensor(tuning.losses(spread.directory)), expected)


@pytest.mark.parametrize("trains_vision", [False, True])
def test_adapters_of_the_tower_are_for_those_who_ask(
    trains_vision: bool, run: Run, models: Models, tmp_path: Path
) -> None:
    result = run("glm-4v", train_vision=trains_vision)
    plan = RunDirectory(result.directory).read().plans[0]
    assert (plan.workload.images, plan.workload.image_size) == (2, (58, 56))
    assert result.result is not None
    names = load_file(result.result / "adapter_model.safetensors")
    assert any(map(is_in_tower, names)) == trains_vision
    assert not all(map(is_in_tower, names))
    merged = load_file(export_result(result.directory, merge=True) / "model.safetensors")
    before = load_file(models("glm-4v") / "model.safetensors")
    assert merged.keys() == before.keys()
    in_tower = [name for name in before if is_in_tower(name)]
    changed = {name for name in in_tower if not torch.equal(before[name], merged[name])}
    assert bool(changed) == trains_vision


@pytest.mark.parametrize("trains_vision", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_parameters(trains_vision: bool, run: Run, models: Models) -> None:
    result = run("glm-4v", method="full", train_vision=trains_vision, lr=1e-3)
    losses = tuning.losses(result.directory)
    assert losses[2] < losses[0]
    assert result.result is not None
    before = load_file(models("glm-4v") / "model.safetensors")
    after = load_file(result.result / "model.safetensors")
    assert after.keys() == before.keys()
    # Without the class token, whose gradient is next to nothing here.
    matrices = [it for it in before if before[it].dim() == 2 and it.endswith("weight")]
    tower = [name for name in matrices if is_in_tower(name)]
    assert tower
    assert not any(torch.equal(before[name], after[name]) for name in {*matrices} - {*tower})
    assert {torch.equal(before[name], after[name]) for name in tower} == {not trains_vision}


def test_evaluation_and_resumption(run: Run, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write_rows(data.parent / "prompts.jsonl", ROWS[0], ROWS[1])
    settings = {"eval_data": (str(data),), "eval_prompts": (str(prompts),), "seq_length": 64}
    whole = run("glm-4v", name="whole", save_every=1, **settings)
    directory = RunDirectory(whole.directory)
    answers = [json.loads(line) for line in directory.answers.read_text().splitlines()]
    assert [it["prompt"] for it in answers] == ["What?", "Why?"] * len(directory.read_evaluations())
    assert len(directory.read_evaluations()) > 1
    expected = tuning.losses(whole.directory)
    for path in sorted(directory.checkpoints.glob("step-*"))[1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    with tuning.one_process(monkeypatch):
        resume(directory)
    assert tuning.losses(whole.directory) == pytest.approx(expected, rel=1e-5)


def test_what_pictures_do_not_go_with(run: Run, data: Path, models: Models, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="samples with images can't be packed"):
        run("glm-4v", packing=True, seq_length=96)
    plan = duoka.plan(
        models("glm-4v"),
        ONE,
        TuneSettings(**SETTINGS, seq_length=96).workload(Checkpoint.open(models("glm-4v"))),
    )
    with pytest.raises(
        UsageError, match=r"for 0 images per sequence and unpadded rows; the data needs 2 images"
    ) as refused:
        run("glm-4v", plan=plan, seq_length=96)
    assert "--images 2 --image-size 56x58" in str(refused.value.hint)
    write_rows(data, ROWS[1])
    with pytest.raises(UsageError, match="no images to train the vision tower on"):
        run("glm-4v", train_vision=True)
    with pytest.raises(UsageError, match="the sequences have none"):
        Workload(new_tokens=0, training=duoka.Training(train_vision=True))


def test_the_loss_is_that_of_the_original_code(
    shared_data: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pictures in a micro-batch, and labels on the text after them."""
    directory = shared_data / "reference" / "glm-4v-9b-tiny"
    values = load_file(directory / "reference.safetensors")
    checkpoint = Checkpoint.open(directory)
    settings = TuneSettings(
        batch=2, micro_batch=2, seq_length=32, images=1, image_size=(112, 112), dtype="float32"
    )
    plan = duoka.plan(directory, "virtual:256MiB", settings.workload(checkpoint))
    pixels = values["image.pixels"]
    pictures = SimpleNamespace(pictures=lambda images: {"pixel_values": pixels[images]})
    monkeypatch.setattr(part_module, "_image_format", lambda checkpoint: pictures)
    monkeypatch.setattr(part_module, "open_image", int)
    part = ModelPart(checkpoint, plan, plan.devices[0], seed=0)
    ids = part.model.config.image_tokens.write_out(values["image.input_ids"])["input_ids"]
    is_text = (ids != part.model.config.boi_token_id).numpy()
    is_text[:, :2] = False
    dataset = Dataset(
        ids=ids.int().numpy().ravel(),
        is_trained=is_text.ravel(),
        ends=torch.tensor([24, 48]).numpy(),
        file_numbers=torch.zeros(2).int().numpy(),
        lines=torch.tensor([1, 2]).numpy(),
        files=("x",),
        seq_length=24,
        images=((0,), (1,)),  # type: ignore[arg-type]
    )
    step = Batches(dataset, batch=2, micro_batch=2, shuffle=False)[0]
    trainer = Trainer(settings, Layout((plan,)), 0, part, 1)
    labels = ids.masked_fill(~torch.from_numpy(is_text), -100)
    expected = cross_entropy(values["image.logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert close(torch.tensor(trainer.evaluate([step])["eval_loss"]), expected)
    assert close(torch.tensor(trainer.step(0, step).loss), expected)


def test_an_answer_has_no_image_tokens() -> None:
    """Code of models counts image tokens, of which each needs features."""
    logits = torch.tensor([[[0.0, 1.0, 3.0, 2.0], [5.0, 0.0, 0.0, 0.0]]])
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=2))
    part: Any = SimpleNamespace(model=model, _call=lambda *_: SimpleNamespace(logits=logits))
    batch = {"labels": torch.tensor([[-100, 7]])}
    assert ModelPart.next_token(part, batch, torch.device("cpu")) == 3
    model.config.image_token_id = None
    assert ModelPart.next_token(part, batch, torch.device("cpu")) == 2
