"""Prompts with images: token ids, and tensors by an image processor.

A checkpoint's files describe its image processor, which needs Pillow alone. Videos are not
supported, and neither is code of a checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.models.auto import image_processing_auto, processing_auto

from duoka.errors import CheckpointError, UsageError

from ..glm4v import GLM4VConfig
from .messages import ChatMessage
from .tokenizer import first_line

_PROCESSORS: dict[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
_SETTINGS = ("processor_config.json", "preprocessor_config.json")


class ImagePrompt(list[int]):
    """Token ids with images among them, and the model's other inputs.

    `pictures` have one or several rows for each of the `num_images`, `rows` [1, tokens, …] one for
    each token.
    """

    def __init__(
        self,
        ids: Sequence[int],
        num_images: int,
        pictures: Mapping[str, Tensor],
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(ids)
        self.num_images = num_images
        self.pictures = dict(pictures)
        self.rows = dict(rows or {})

    def extend(self, ids: Iterable[int]) -> None:
        """Add tokens of text."""
        num_tokens = len(self)
        super().extend(ids)
        num_more = len(self) - num_tokens
        for name, row in self.rows.items():
            more = row.new_zeros((1, num_more, *row.shape[2:]))
            self.rows[name] = torch.cat((row, more), dim=1)


def images_of(messages: Sequence[ChatMessage]) -> list[Image.Image]:
    """Return all images of a conversation, in their order."""
    return [image for message in messages for image in message.images]


def joined_pictures(prompts: Sequence[ImagePrompt], dtype: torch.dtype) -> dict[str, Tensor]:
    """Join the images of a batch of prompts."""
    joined = {
        name: torch.cat([prompt.pictures[name] for prompt in prompts])
        for name in prompts[0].pictures
    }
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in joined.items()
    }


def padded_rows(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Join the rows of a batch of prompts, with zeros on the left of shorter prompts."""
    longest = max(map(len, prompts))
    padded: dict[str, Tensor] = {}
    for number, prompt in enumerate(prompts):
        for name, row in prompt.rows.items() if isinstance(prompt, ImagePrompt) else ():
            if name not in padded:
                padded[name] = row.new_zeros((len(prompts), longest, *row.shape[2:]))
            padded[name][number, longest - len(prompt) :] = row[0]
    return padded


class ImageFormat:
    """The image processor of a checkpoint, loaded with the first image."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    @cached_property
    def processor(self) -> Any:
        """The processor, of transformers."""
        return self._load()

    def pixel_count(self, image: Image.Image) -> int:
        """Count the numbers of an image in the model's input."""
        alone = getattr(self.processor, "image_processor", self.processor)
        tensors = self._process(alone, images=[image], **image_settings(type(self.processor)))
        return sum(value.numel() for value in tensors.values() if value.is_floating_point())

    def _process(self, processor: Any, **inputs: Any) -> dict[str, Tensor]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # transformers' own about NumPy
                batch: Mapping[str, Any] = processor(**inputs, return_tensors="pt")
        except Exception as error:  # by settings out of the checkpoint: it can raise anything
            raise UsageError(
                f"the model's image processor rejects the images: {first_line(error)}",
                hint="try an image of another size",
            ) from error
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


class SquareImages(ImageFormat):
    """The form of GLM-4V: every image has the same size and number of tokens."""

    def __init__(self, config: Mapping[str, Any], directory: Path) -> None:
        parsed = GLM4VConfig.from_dict(dict(config))
        vision: Any = parsed.vision_config
        super().__init__(partial(_load_square_processor, directory, vision.image_size))
        tokens = parsed.image_tokens
        self.ids = [tokens.begin] * tokens.num_tokens

    def pictures(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Return images in the form of the model's input."""
        return self._process(self.processor, images=list(images))


class PromptImages(ImageFormat):
    """The form of other models, by processors with placeholders in a prompt's text."""

    def __init__(
        self, directory: Path, tokenizer: PreTrainedTokenizerBase, model_type: str
    ) -> None:
        super().__init__(partial(_load_processor, directory, tokenizer, model_type))

    @classmethod
    def find(
        cls, directory: Path | None, tokenizer: PreTrainedTokenizerBase, model_type: str
    ) -> PromptImages | None:
        """Return the format of a model type; None without a processor."""
        is_known = directory is not None and model_type in _PROCESSORS
        return cls(directory, tokenizer, model_type) if directory and is_known else None

    def prompt(self, text: str, images: Sequence[Image.Image]) -> ImagePrompt:
        """Return the prompt of a text with a placeholder for each image."""
        batch = self._process(
            self.processor, text=[text], images=[list(images)], add_special_tokens=False
        )
        ids = batch.pop("input_ids")
        batch.pop("attention_mask", None)
        rows = {name: value for name, value in batch.items() if value.shape[:2] == ids.shape}
        pictures = {name: value for name, value in batch.items() if name not in rows}
        return ImagePrompt(ids[0].tolist(), len(images), pictures, rows)

    def is_imitated(self, text: str) -> bool:
        """Return True if a text holds a placeholder of the processor."""
        tokens = [value for name, value in vars(self.processor).items() if name.endswith("_token")]
        return any(isinstance(token, str) and token in text for token in tokens)


def image_settings(processor_class: Any) -> dict[str, Any]:
    """Return the defaults of a processor class for its image processor."""
    if getattr(processor_class, "is_dummy", False):  # a stand-in for want of a library
        return {}
    stated = getattr(processor_class, "images_kwargs", None)
    if stated is None:  # as transformers up to 5.17 has it
        described = getattr(processor_class, "valid_processor_kwargs", None)
        stated = getattr(described, "_defaults", {}).get("images_kwargs")
    return {name: value for name, value in (stated or {}).items() if name != "return_tensors"}


# ── from a checkpoint's files ──


def _load_processor(directory: Path, tokenizer: PreTrainedTokenizerBase, model_type: str) -> Any:
    """Load the processor of a checkpoint, or of its family."""
    with _reading(directory):
        known: Any = getattr(transformers, _PROCESSORS[model_type])
        settings, _ = known.get_processor_dict(directory, local_files_only=True)
        parts = {"tokenizer": tokenizer, "image_processor": _image_processor(directory)}
        names = known.get_attributes()
        images_only: Any = type(known.__name__, (_ImagesOnly, known), {"__init__": known.__init__})
        return images_only.from_args_and_dict([parts.get(name) for name in names], settings)


def _load_square_processor(directory: Path, side: int) -> Any:
    """Load the processor of a vision tower with one size: the checkpoint's, or CLIP's.

    The source is GLM-4V's published tokenizer, which scales without cutting.
    """
    if (directory / "preprocessor_config.json").is_file():
        with _reading(directory):
            return _image_processor(directory)
    size = {"height": side, "width": side}
    return transformers.CLIPImageProcessorPil(size=size, do_center_crop=False)


class _ImagesOnly:
    """A processor without its part for videos: that needs torchvision."""

    def check_argument_for_proper_class(self, name: str, part: object) -> object:
        """See `ProcessorMixin`."""
        inherited: Any = super()
        return None if part is None else inherited.check_argument_for_proper_class(name, part)


def _image_processor(directory: Path) -> Any:
    # Of the package itself this class asks for torchvision up to transformers 5.17.
    return image_processing_auto.AutoImageProcessor.from_pretrained(
        directory, backend="pil", local_files_only=True, trust_remote_code=False
    )


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Raise CheckpointError without the settings of an image processor, or for damaged ones."""
    if not any((directory / name).is_file() for name in _SETTINGS):
        raise CheckpointError(
            f"{directory} has no image processor configuration",
            hint=f"add its {' or '.join(_SETTINGS)} to the directory",
        )
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"no image processor could be loaded from {directory}: {first_line(error)}",
            hint="install the libraries it needs, built for this torch"
            if isinstance(error, ImportError)
            else f"check {' or '.join(_SETTINGS)}: it may be damaged, or made for other versions",
        ) from error
