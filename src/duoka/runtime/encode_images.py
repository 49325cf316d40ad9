"""Encoding images: pixels to features before a prompt is read, some images at a time.

Transformers' `generate` encodes all images of a batch at once, and gives a model their features as
`mm_encoder_outputs`. Here they are encoded in passes, and of each only what models read is kept: a
tower's hidden states would stay in memory until the last token.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import utils as generation

from duoka.errors import UsageError
from duoka.forecast.workload import image_passes
from duoka.models.text.image_prompts import ImagePrompt, joined_pictures, padded_rows

from .dispatch.arguments import bring, mapped

FEATURES = "mm_encoder_outputs"
_PIXELS = ("pixel_values", "pixel_values_images", "image_patches")
READ_ONCE = (FEATURES, *_PIXELS)
"""What a model reads with the prompt alone."""
_GRIDS = "image_grid_thw"
_DROPPED = ("last_hidden_state", "hidden_states", "attentions")
# Their code reads more of what the tower returns than its last features.
_READ_ALL = frozenset({"blip-2", "fuyu", "instructblip", "llama4", "ovis2"})


def encodes_apart(model: PreTrainedModel) -> bool:
    """Whether a model takes features of images that were encoded before its call."""
    return (
        FEATURES in inspect.signature(model.forward).parameters
        and hasattr(model.base_model, "get_image_features")
        and model.config.model_type not in _READ_ALL
    )


def reads_in_chunks(model: PreTrainedModel) -> bool:
    """Whether a prompt with images can be read in chunks.

    Not where a picture's tokens look at those behind them: the chunk may end between the two.
    """
    text = model.config.get_text_config()
    return (
        encodes_apart(model)
        and hasattr(generation, "_slice_mm_encoder_output")
        and "token_type_ids" not in inspect.signature(model.forward).parameters
        and not getattr(text, "use_bidirectional_attention", None)
    )


def refuse_parts(model: PreTrainedModel, *, in_passes: bool, in_chunks: bool) -> None:
    """Refuse passes and chunks that a model's code doesn't know."""
    name = type(model).__name__
    if in_passes and not encodes_apart(model):
        raise UsageError(
            f"{name} encodes all images of a prompt at once, with this version of transformers",
            hint="leave out the vision batch",
        )
    if in_chunks and not reads_in_chunks(model):
        raise UsageError(
            f"{name} reads a prompt with images whole, with this version of transformers",
            hint="leave out the prefill chunk",
        )


def passes_of(pictures: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """What an image processor made of a batch's images, in passes of so many images.

    Rows of pixels are patches where a grid says how many a picture has; else all images have
    as many rows.
    """
    if len(sizes) == 1:
        return [dict(pictures)]
    images = sum(sizes)
    grids = pictures.get(_GRIDS)
    num_rows = {name: len(tensor) for name, tensor in pictures.items() if name in _PIXELS}
    if grids is not None:
        rows = grids.prod(dim=-1).tolist()
    elif all(number % images == 0 for number in num_rows.values()):
        rows = [next(iter(num_rows.values())) // images] * images
    else:
        raise UsageError(
            f"{images} images come as {max(num_rows.values())} parts, which can't be encoded in "
            f"passes of {sizes[0]}",
            hint="give images of one size, or leave out the vision batch",
        )
    passes, done = [], 0
    for size in sizes:
        first, last = sum(rows[:done]), sum(rows[: done + size])
        passes.append(
            {
                name: tensor[first:last] if name in _PIXELS else tensor[done : done + size]
                for name, tensor in pictures.items()
            }
        )
        done += size
    return passes


def encode(model: PreTrainedModel, pictures: Mapping[str, Tensor]) -> Any:
    """The features of some images, as the model's forward takes them."""
    owner: Any = model.base_model
    accepted = inspect.signature(owner.get_image_features).parameters
    output = owner.get_image_features(
        **{name: tensor for name, tensor in pictures.items() if name in accepted}, return_dict=True
    )
    return type(output)(**{name: part for name, part in output.items() if name not in _DROPPED})


def joined(outputs: Sequence[Any]) -> dict[str, Any]:
    """What all passes made, under the name of the modality."""
    first = outputs[0]
    if len(outputs) == 1:
        return {"image": first}
    return {
        "image": type(first)(
            **{name: _joined([output[name] for output in outputs], name) for name in first}
        )
    }


def _joined(parts: Sequence[Any], name: str) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    if name == "deepstack_features":  # a list of layers, each with all images
        return [_joined(layer, "") for layer in zip(*parts, strict=True)]
    return [feature for part in parts for feature in part]


def arguments_with_features(
    model: PreTrainedModel, pictures: Mapping[str, Tensor], sizes: Sequence[int]
) -> dict[str, Any]:
    """What `generate` is given instead of pixels: features, encoded with `sizes` images at a time.

    The caller empties `FEATURES` when the prompt is read; `generate` keeps it to the end. A model
    that encodes images itself is given them as they are.
    """
    if not encodes_apart(model):
        return dict(pictures)
    reader = ImageReader(model, pictures, sizes)
    with torch.no_grad():
        for _ in sizes:
            reader.encode()
        reader.finish()
    return {**reader.pictures, FEATURES: reader.features}


def image_arguments(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    vision_batch: int | None,
) -> dict[str, Any]:
    """What `generate` is given of the images in prompts, encoded in passes; of none, nothing."""
    with_images = [prompt for prompt in prompts if isinstance(prompt, ImagePrompt)]
    if not with_images:
        return {}
    accepted = inspect.signature(model.forward).parameters
    pictures, rows = (
        {name: value.to(device) for name, value in tensors.items() if name in accepted}
        for tensors in (joined_pictures(with_images, model.dtype), padded_rows(prompts))
    )
    sizes = image_passes(sum(prompt.num_images for prompt in with_images), vision_batch)
    return {**rows, **arguments_with_features(model, pictures, sizes)}


class ImageReader:
    """A batch of prompts with images over one cache: images encoded in passes, then the text read.

    `pictures` are what an image processor made of all images, of which nothing but grids is left
    when they are encoded; `sizes` are how many of them are encoded at a time.
    """

    def __init__(
        self, model: PreTrainedModel, pictures: Mapping[str, Tensor], sizes: Sequence[int]
    ) -> None:
        self._model: Any = model
        self.pictures = dict(pictures)
        self.features: dict[str, Any] = {}
        self._device = next(iter(pictures.values())).device
        self._waiting = passes_of(pictures, sizes)
        self._outputs: list[Any] = []

    def encode(self) -> None:
        """Encode the next pass. Features are wanted where the text's embeddings are."""
        output = encode(self._model, self._waiting.pop(0))
        self._outputs.append(mapped(output, partial(bring, device=self._device)))

    def finish(self) -> None:
        """Put together what all passes made; pixels are no longer needed."""
        self.pictures = {k: v for k, v in self.pictures.items() if k not in _PIXELS}
        self.features = joined(self._outputs)
        self._outputs.clear()

    def begin(self, text: Mapping[str, Tensor]) -> None:
        """Take the prompts, on the CPU: ids, mask and what else a model reads beside them.

        Positions are made there: a virtual GPU doesn't compute with as many numbers.
        """
        self.finish()
        arguments = dict(text)
        if "position_ids" in inspect.signature(self._model.forward).parameters:
            known = {**text, **{name: grid.cpu() for name, grid in self.pictures.items()}}
            prepare = self._model._prepare_position_ids_for_generation
            arguments["position_ids"] = prepare(text["input_ids"], known)
        self._is_image = text["input_ids"] == getattr(self._model.config, "image_token_id", -1)
        self._text = {name: tensor.to(self._device) for name, tensor in arguments.items()}
        self._ids = self._text.pop("input_ids")

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        """What the model prepares a step from that reads some of the prompts' tokens."""
        text = {
            name: tensor[..., start:stop] if name == "position_ids" else tensor[..., :stop]
            for name, tensor in self._text.items()
            if tensor.shape[-1:] == self._ids.shape[-1:]
        }
        features = self.features
        if stop - start < self._ids.shape[1]:
            features = self._features_of(start, stop)
        return {
            **self._text,
            **text,
            "input_ids": self._ids[:, start:stop],
            **({FEATURES: features} if features else {}),
        }

    def _features_of(self, start: int, stop: int) -> dict[str, Any]:
        """The features whose tokens are in a chunk of the prompts."""
        is_image = self._is_image
        chunk = is_image[:, start:stop]
        if not chunk.any():
            return {}
        rows = (is_image.flatten().cumsum(0).view_as(is_image) - 1)[:, start:stop][chunk]
        cut: Any = generation._slice_mm_encoder_output  # as `generate` itself cuts them
        return {"image": cut(self.features["image"], rows.to(self._device))}
