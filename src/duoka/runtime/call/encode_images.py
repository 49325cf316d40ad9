"""Encodes images: pixels to features before a prompt is read, some images at a time.

Transformers' `generate` encodes all images of a batch at once, and gives a model their features as
`mm_encoder_outputs`. Here images are encoded in passes, and only the outputs that models read are
kept: the hidden states of a tower would otherwise stay in memory until the last token.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import utils as generation

from duoka.errors import UsageError
from duoka.forecast.workload import image_passes
from duoka.models.text.image_prompts import ImagePrompt, joined_pictures, padded_rows

from ..dispatch.arguments import bring, mapped

FEATURES = "mm_encoder_outputs"
_PIXELS = ("pixel_values", "pixel_values_images", "image_patches")
READ_ONCE = (FEATURES, *_PIXELS)
"""Arguments that a model reads only together with the prompt, not in decode steps."""
_GRIDS = "image_grid_thw"
_DROPPED = ("last_hidden_state", "hidden_states", "attentions")
# Model types whose code reads more of a tower's outputs than the final features.
_READ_ALL = frozenset({"blip-2", "fuyu", "instructblip", "llama4", "ovis2"})


def encodes_apart(model: PreTrainedModel) -> bool:
    """Return True if a model's `forward` accepts image features that were encoded before."""
    return (
        FEATURES in inspect.signature(model.forward).parameters
        and hasattr(model.base_model, "get_image_features")
        and model.config.model_type not in _READ_ALL
    )


def reads_in_chunks(model: PreTrainedModel) -> bool:
    """Return True if a prompt with images can be read in chunks.

    Return False where tokens of an image attend to later tokens of the same image, since a chunk
    may end between them.
    """
    text = model.config.get_text_config()
    return (
        encodes_apart(model)
        and hasattr(generation, "_slice_mm_encoder_output")
        and "token_type_ids" not in inspect.signature(model.forward).parameters
        and not getattr(text, "use_bidirectional_attention", None)
    )


def refuse_parts(model: PreTrainedModel, *, in_passes: bool, in_chunks: bool) -> None:
    """Raise UsageError for image passes or prefill chunks that the model doesn't support."""
    name = type(model).__name__
    if in_passes and not encodes_apart(model):
        raise UsageError(
            f"{name} encodes all images of a prompt at once with this version of transformers",
            hint="omit the vision batch",
        )
    if in_chunks and not reads_in_chunks(model):
        raise UsageError(
            f"{name} doesn't support chunked prefill with images with this version of transformers",
            hint="omit the prefill chunk",
        )


def image_arguments(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    device: torch.device,
    vision_batch: int | None,
) -> dict[str, Any]:
    """Make `generate`'s arguments for the images of prompts, encoded `vision_batch` at a time."""
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


def arguments_with_features(
    model: PreTrainedModel, pictures: Mapping[str, Tensor], sizes: Sequence[int]
) -> dict[str, Any]:
    """Replace pixels among `generate`'s arguments by features, encoded in passes of `sizes` images.

    The caller should free `FEATURES` once the prompt is read; `generate` itself keeps them to its
    end. For a model that must encode images itself, the pixels are returned.
    """
    if not encodes_apart(model):
        return dict(pictures)
    reader = ImageReader(model, pictures, sizes)
    with torch.no_grad():
        for _ in sizes:
            reader.encode()
        reader.finish()
    return {**reader.pictures, FEATURES: reader.features}


class ImageReader:
    """Encodes the images of a batch of prompts in passes, then cuts their text into chunks.

    Parameters
    ----------
    model : PreTrainedModel
    pictures : mapping of str to Tensor
        An image processor's outputs for all images. Pixels are freed once all are encoded.
    sizes : sequence of int
        Number of images of each pass.
    """

    def __init__(
        self, model: PreTrainedModel, pictures: Mapping[str, Tensor], sizes: Sequence[int]
    ) -> None:
        self._model: Any = model
        self.pictures = dict(pictures)
        self.features: dict[str, Any] = {}
        self._device = next(iter(pictures.values())).device
        self._passes = _split_in_passes(pictures, sizes)
        self._outputs: list[Any] = []

    def encode(self) -> None:
        """Encode the images of the next pass; features are brought to the device of the pixels."""
        owner: Any = self._model.base_model
        accepted = inspect.signature(owner.get_image_features).parameters
        pictures = {k: tensor for k, tensor in self._passes.pop(0).items() if k in accepted}
        output = owner.get_image_features(**pictures, return_dict=True)
        del pictures
        parts = {name: part for name, part in output.items() if name not in _DROPPED}
        output = type(output)(**parts)
        self._outputs.append(mapped(output, partial(bring, device=self._device)))

    def finish(self) -> None:
        """Join the features of all passes into `features`, and free the pixels."""
        self.pictures = {k: v for k, v in self.pictures.items() if k not in _PIXELS}
        self.features = {"image": _join(self._outputs)}
        self._outputs.clear()

    def begin(self, text: Mapping[str, Tensor]) -> None:
        """Set the prompts, given on the CPU: ids, mask and other arguments of the model.

        Positions are computed on the CPU, since a virtual GPU may not know values of that size.
        """
        self.finish()
        arguments = dict(text)
        if "position_ids" in inspect.signature(self._model.forward).parameters:
            on_cpu = {**text, **{name: grid.cpu() for name, grid in self.pictures.items()}}
            prepare = self._model._prepare_position_ids_for_generation
            arguments["position_ids"] = prepare(text["input_ids"], on_cpu)
        self._is_image = text["input_ids"] == getattr(self._model.config, "image_token_id", -1)
        self._text = {name: tensor.to(self._device) for name, tensor in arguments.items()}
        self._ids = self._text.pop("input_ids")

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        """Return the arguments for the chunk of tokens [start, stop) of every prompt."""
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
        """Return the features of the image tokens in a chunk; empty without image tokens there."""
        # Features are rows in the order of the image tokens of all prompts. Of a prompt t i i t i i
        # the features are numbered . 0 1 . 2 3; the chunk [2, 5) holds the tokens i t i, whose rows
        # are 1 and 2.
        is_image = self._is_image
        chunk = is_image[:, start:stop]
        if not chunk.any():
            return {}
        rows = (is_image.flatten().cumsum(0).view_as(is_image) - 1)[:, start:stop][chunk]
        cut: Any = generation._slice_mm_encoder_output  # the function that `generate` uses
        return {"image": cut(self.features["image"], rows.to(self._device))}


def _split_in_passes(
    pictures: Mapping[str, Tensor], sizes: Sequence[int]
) -> list[dict[str, Tensor]]:
    """Split an image processor's outputs into passes of `sizes` images each.

    If there is a grid, rows of pixels are patches, and the grid gives their number for each image.
    Otherwise all images have the same number of rows.
    """
    if len(sizes) == 1:
        return [dict(pictures)]
    images = sum(sizes)
    num_rows = {name: len(tensor) for name, tensor in pictures.items() if name in _PIXELS}
    if _GRIDS in pictures:
        rows = pictures[_GRIDS].prod(dim=-1).tolist()
    elif all(number % images == 0 for number in num_rows.values()):
        rows = [next(iter(num_rows.values())) // images] * images
    else:
        raise UsageError(
            f"{images} images consist of {max(num_rows.values())} parts, which can't be encoded "
            f"in batches of {sizes[0]}",
            hint="use images of one size, or omit the vision batch",
        )
    # Images of 4, 6 and 2 patches in passes of 2 images: image_ends 0, 2, 3; row_ends 0, 10, 12.
    image_ends = list(accumulate(sizes, initial=0))
    row_ends = [sum(rows[:end]) for end in image_ends]
    return [
        {name: part[slice(*(ends if name in _PIXELS else span))] for name, part in pictures.items()}
        for span, ends in zip(pairwise(image_ends), pairwise(row_ends), strict=True)
    ]


def _join(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of all passes along the images."""
    if len(outputs) == 1:
        return outputs[0]
    parts = {name: _join_parts([output[name] for output in outputs], name) for name in outputs[0]}
    return type(outputs[0])(**parts)


def _join_parts(parts: Sequence[Any], name: str) -> Any:
    """Concatenate one output of all passes: tensors, lists of layers, or lists of images."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    if name == "deepstack_features":  # a list of layers, each with all images
        return [_join_parts(layer, "") for layer in zip(*parts, strict=True)]
    return [feature for part in parts for feature in part]
