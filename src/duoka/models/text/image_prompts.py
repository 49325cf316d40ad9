"""Prompts with images: token ids, and the tensors of an image processor.

The image processor is loaded from a checkpoint's settings, and needs only Pillow. Videos and remote
code aren't supported.
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
from .messages import Messages
from .tokenizer import ENCODING, first_line

_PROCESSORS: dict[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
_SETTINGS = ("processor_config.json", "preprocessor_config.json")
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments of `forward` that are 1 for image tokens, and 0 for others."""


class ImagePrompt(list[int]):
    """The token ids of a prompt with images, and the model's other inputs.

    `pictures` are tensors with one or more rows for each of the `num_images` images; `rows` are
    tensors [1, tokens, …] with a value for each token.
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
        """Append tokens of text; their values in `rows` are zeros."""
        num_tokens = len(self)
        super().extend(ids)
        num_more = len(self) - num_tokens
        for name, row in self.rows.items():
            more = row.new_zeros((1, num_more, *row.shape[2:]))
            self.rows[name] = torch.cat((row, more), dim=1)


def images_of(messages: Messages) -> list[Image.Image]:
    """Return all images of a conversation, in order."""
    return [image for message in messages for image in message.images]


def joined_pictures(prompts: Sequence[ImagePrompt], dtype: torch.dtype) -> dict[str, Tensor]:
    """Concatenate the image tensors of a batch of prompts; cast floating-point ones to a dtype."""
    joined = {}
    for name in prompts[0].pictures:
        values = torch.cat([prompt.pictures[name] for prompt in prompts])
        joined[name] = values.to(dtype) if values.is_floating_point() else values
    return joined


def padded_rows(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Stack the `rows` of a batch of prompts, padded with zeros on the left; text has zeros."""
    longest = max(map(len, prompts))
    padded: dict[str, Tensor] = {}
    for number, prompt in enumerate(prompts):
        for name, row in prompt.rows.items() if isinstance(prompt, ImagePrompt) else ():
            if name not in padded:
                padded[name] = row.new_zeros((len(prompts), longest, *row.shape[2:]))
            padded[name][number, longest - len(prompt) :] = row[0]
    return padded


class ImageFormat:
    """The image processor of a checkpoint, loaded on first use."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    @cached_property
    def processor(self) -> Any:
        """The processor, an object of transformers."""
        return self._load()

    def pictures(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Return the image processor's tensors for images."""
        alone = getattr(self.processor, "image_processor", self.processor)
        return self._process(alone, images=list(images), **image_settings(type(self.processor)))

    def pixel_count(self, image: Image.Image) -> int:
        """Count the floating-point elements of the model's input for an image."""
        tensors = self.pictures([image]).values()
        return sum(value.numel() for value in tensors if value.is_floating_point())

    def _process(self, processor: Any, **inputs: Any) -> dict[str, Tensor]:
        """Call a processor and return its tensors; raise UsageError for rejected images."""
        try:
            with ENCODING, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # transformers' own about NumPy
                batch: Mapping[str, Any] = processor(**inputs, return_tensors="pt")
        except Exception as error:  # the checkpoint's settings can make it raise anything
            raise UsageError(
                f"the model's image processor rejects the images: {first_line(error)}",
                hint="try an image of another size",
            ) from error
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


class SquareImages(ImageFormat):
    """The image format of GLM-4V: all images are scaled to the same size and number of tokens."""

    def __init__(self, config: Mapping[str, Any], directory: Path) -> None:
        parsed = GLM4VConfig.from_dict(dict(config))
        vision: Any = parsed.vision_config
        super().__init__(partial(_load_square_processor, directory, vision.image_size))
        tokens = parsed.image_tokens
        self.ids = [tokens.begin] * tokens.num_tokens


class PromptImages(ImageFormat):
    """The image format of other models: a processor expands placeholders in the prompt's text."""

    def __init__(
        self, directory: Path, tokenizer: PreTrainedTokenizerBase, model_type: str
    ) -> None:
        super().__init__(partial(_load_processor, directory, tokenizer, model_type))

    @classmethod
    def find(
        cls, directory: Path | None, tokenizer: PreTrainedTokenizerBase, model_type: str
    ) -> PromptImages | None:
        """Return the image format of a model type; None without a processor or a directory."""
        is_known = directory is not None and model_type in _PROCESSORS
        return cls(directory, tokenizer, model_type) if directory and is_known else None

    def prompt(self, text: str, images: Sequence[Image.Image]) -> ImagePrompt:
        """Encode a text with a placeholder for each image."""
        batch = self._process(
            self.processor, text=[text], images=[list(images)], add_special_tokens=False
        )
        ids = batch.pop("input_ids")
        batch.pop("attention_mask", None)
        rows = {name: value for name, value in batch.items() if value.shape[:2] == ids.shape}
        pictures = {name: value for name, value in batch.items() if name not in rows}
        return ImagePrompt(ids[0].tolist(), len(images), pictures, rows)

    def is_imitated(self, text: str) -> bool:
        """Return True if a text has a placeholder of the processor."""
        tokens = [value for name, value in vars(self.processor).items() if name.endswith("_token")]
        return any(isinstance(token, str) and token in text for token in tokens)


def image_settings(processor_class: Any) -> dict[str, Any]:
    """Return a processor class's defaults for its image processor."""
    if getattr(processor_class, "is_dummy", False):  # transformers' stand-in without a library
        return {}
    stated = getattr(processor_class, "images_kwargs", None)
    if stated is None:  # transformers up to 5.17
        described = getattr(processor_class, "valid_processor_kwargs", None)
        stated = getattr(described, "_defaults", {}).get("images_kwargs")
    return {name: value for name, value in (stated or {}).items() if name != "return_tensors"}


# ── loading from a checkpoint's files ──


def _load_processor(directory: Path, tokenizer: PreTrainedTokenizerBase, model_type: str) -> Any:
    """Load the processor class of a model type with the checkpoint's settings."""
    with _reading(directory):
        known: Any = getattr(transformers, _PROCESSORS[model_type])
        settings, _ = known.get_processor_dict(directory, local_files_only=True)
        parts = {"tokenizer": tokenizer, "image_processor": _image_processor(directory)}
        names = known.get_attributes()
        images_only: Any = type(known.__name__, (_ImagesOnly, known), {"__init__": known.__init__})
        return images_only.from_args_and_dict([parts.get(name) for name in names], settings)


def _load_square_processor(directory: Path, side: int) -> Any:
    """Load the checkpoint's image processor; without settings CLIP's, for a fixed image size.

    GLM-4V's published tokenizer does the same as CLIP's, without cropping.
    """
    if (directory / "preprocessor_config.json").is_file():
        with _reading(directory):
            return _image_processor(directory)
    size = {"height": side, "width": side}
    return transformers.CLIPImageProcessorPil(size=size, do_center_crop=False)


class _ImagesOnly:
    """Mixin for processors without their video processor, which would need torchvision."""

    def check_argument_for_proper_class(self, name: str, part: object) -> object:
        """See `ProcessorMixin`."""
        inherited: Any = super()
        return None if part is None else inherited.check_argument_for_proper_class(name, part)


def _image_processor(directory: Path) -> Any:
    """Load the image processor of a checkpoint, in its Pillow version."""
    # Not `transformers.AutoImageProcessor`, which requires torchvision up to 5.17.
    return image_processing_auto.AutoImageProcessor.from_pretrained(
        directory, backend="pil", local_files_only=True, trust_remote_code=False
    )


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Convert errors of loading an image processor to CheckpointError; so are missing settings."""
    if not any((directory / name).is_file() for name in _SETTINGS):
        hint = f"add its {' or '.join(_SETTINGS)} to the directory"
        raise CheckpointError(f"{directory} has no image processor configuration", hint=hint)
    try:
        yield
    except Exception as error:
        hint = f"check {' or '.join(_SETTINGS)}: it may be damaged, or made for other versions"
        if isinstance(error, ImportError):
            hint = "install the libraries it needs, built for this torch"
        message = f"no image processor could be loaded from {directory}: {first_line(error)}"
        raise CheckpointError(message, hint=hint) from error
