"""GLM-4V-9B: GLM-4-9B with a vision tower, under the published names.

The published configuration is that of the text model, with a ``vision_config`` and the two tokens
around an image. Images are passed as `pixel_values` or, as in the published code, `images`. An
image in a prompt is either the three tokens of the published tokenizer, or `boi_token_id` for each
of its features: the expanded form, which chunked prefill needs. `ImageTokens` describes both.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutputWithPooling

from duoka.errors import UsageError

from .cache_argument import CACHE, takes_cache
from .chatglm import ChatGLMConfig, ChatGLMForCausalLM, ChatGLMModel
from .eva_clip import EvaClip, EvaClipConfig
from .image_tokens import ImageTokens


@strict
class GLM4VConfig(ChatGLMConfig):
    """A configuration of the family with a ``vision_config``."""

    sub_configs = {"vision_config": EvaClipConfig}  # noqa: RUF012 (transformers' own form)
    attribute_map = {"image_token_id": "boi_token_id"}  # noqa: RUF012

    vision_config: EvaClipConfig | dict[str, Any] | None = None
    boi_token_id: int = 151339
    eoi_token_id: int = 151340

    def __post_init__(self, **kwargs: Any) -> None:
        """Parse the ``vision_config``."""
        if not isinstance(self.vision_config, EvaClipConfig):
            self.vision_config = EvaClipConfig(**(self.vision_config or {}))
        super().__post_init__(**kwargs)

    @property
    def image_tokens(self) -> ImageTokens:
        """The image tokens of prompts."""
        vision: Any = self.vision_config
        return ImageTokens(self.boi_token_id, self.eoi_token_id, vision.num_features)


class GLM4VModel(ChatGLMModel):
    """The decoder without its head, and the vision tower."""

    config: GLM4VConfig
    config_class = GLM4VConfig
    input_modalities = ["image", "text"]  # noqa: RUF012
    _no_split_modules = ["ChatGLMDecoderLayer", "EvaClipBlock"]  # noqa: RUF012
    _supports_flash_attn = False  # it would take repeated positions for a new packed sequence

    def __init__(self, config: GLM4VConfig) -> None:
        super().__init__(config)
        self.vision = EvaClip(config)

    def get_image_features(self, pixel_values: Tensor, return_dict: Literal[True] = True) -> Any:
        """Encode images as features: `pooler_output` [images, tokens, width]."""
        return BaseModelOutputWithPooling(pooler_output=self.vision(pixel_values))

    # All patches of an image share a position, so the next position doesn't follow from the length
    # of the cache. The cache has it in an attribute `reached` = (length, [batch, 2]): the next
    # position, and the number of tokens of an unfinished image at the end of the last chunk.
    # With 4 patches, after the chunk "text begin begin": length 3, next position 3, begun 2.
    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute hidden states of text with images; see `GlmModel`.

        `pixel_values` are [images, channels, height, width], in the order of the prompts' images.
        `mm_encoder_outputs` may have the output of `get_image_features` for them, as "image".
        """
        encoded = (mm_encoder_outputs or {}).get("image")
        if pixel_values is not None:
            encoded = self.get_image_features(pixel_values)
        reached = None
        if input_ids is not None:
            if position_ids is None:
                position_ids, begun = self.positions(input_ids, attention_mask, cache)
                reached = torch.cat((position_ids[:, -1:] + 1, begun), dim=1)
            elif encoded is not None:
                reached = functional.pad(position_ids[:, -1:] + 1, (0, 1))
            _, before = getattr(cache, "reached", (0, None))
            if reached is not None and before is not None and before.shape == reached.shape:
                reached = before.copy_(reached)  # in place: no memory is freed
            inputs_embeds = self.embed_tokens(input_ids)
        if encoded is not None:
            if input_ids is None:
                raise UsageError("images need input_ids with image tokens")
            inputs_embeds = self._insert_features(inputs_embeds, input_ids, encoded.pooler_output)
            if attention_mask is None and cache is None:
                # Without a mask transformers would take repeated positions for a packed sequence.
                attention_mask = torch.ones_like(input_ids)
        kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids}
        outputs = super().forward(cache=cache, inputs_embeds=inputs_embeds, **kwargs)
        cache = getattr(outputs, CACHE, None)
        if cache is not None and reached is not None:
            cache.reached = cache.get_seq_length(), reached
        return outputs

    def positions(
        self, ids: Tensor, mask: Tensor | None = None, cache: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Compute `ImageTokens.positions` of tokens that follow the tokens in a cache."""
        first: Any = 0 if cache is None else cache.get_seq_length()
        begun: Any = 0
        if first and hasattr(cache, "reached"):
            # The next position is less than the cache's length after an image. Tokens that were
            # added to the cache since `reached` was set count one position each.
            length, reached = cache.reached
            last, begun = reached.split(1, dim=1)
            first = last + (first - length)
        mask = None if mask is None or mask.dim() != 2 else mask[:, -ids.shape[1] :]
        positions, begun = self.config.image_tokens.positions(ids, mask, begun)
        return positions + first, begun

    def _insert_features(self, embeds: Any, ids: Tensor, pictures: Any) -> Tensor:
        """Replace the embeddings of image tokens by the features of images."""
        joined = pictures.flatten(0, 1) if isinstance(pictures, Tensor) else torch.cat(pictures)
        features = joined.to(embeds)
        where = ids == self.config.boi_token_id
        if int(where.sum()) != len(features):
            tokens = self.config.image_tokens
            raise UsageError(
                f"the images have {len(features)} features, and the prompts {int(where.sum())} "
                f"image tokens; each image has {tokens.num_tokens}",
                hint=f"an image is {tokens.begin}, a placeholder token and {tokens.end}; or "
                f"{tokens.num_tokens} times {tokens.begin}",
            )
        whole: Tensor = embeds.masked_scatter(where[..., None].to(embeds.device), features)
        return whole


class GLM4VForConditionalGeneration(ChatGLMForCausalLM):
    """The decoder with its language-model head, and the vision tower."""

    config: GLM4VConfig
    config_class = GLM4VConfig
    input_modalities = GLM4VModel.input_modalities
    _no_split_modules = GLM4VModel._no_split_modules
    _supports_flash_attn = GLM4VModel._supports_flash_attn
    decoder_class = GLM4VModel

    @takes_cache
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        pixel_values: Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute logits of text with images; see `GlmForCausalLM` and `GLM4VModel`.

        With images, prompts and labels are expanded: logits belong to the tokens of that form.
        """
        kwargs |= {"pixel_values": kwargs.pop("images", pixel_values)}
        kwargs |= {"mm_encoder_outputs": mm_encoder_outputs, "inputs_embeds": inputs_embeds}
        kwargs |= {"cache": cache, "use_cache": use_cache, "logits_to_keep": logits_to_keep}
        rows: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        rows |= {"labels": labels, "position_ids": position_ids}
        if input_ids is not None and (kwargs["pixel_values"] is not None or mm_encoder_outputs):
            rows = self.config.image_tokens.write_out(**rows)
        return super().forward(**rows, **kwargs)

    def get_image_features(self, pixel_values: Tensor, return_dict: Literal[True] = True) -> Any:
        """Encode images as features for the decoder; see `GLM4VModel`."""
        return self.model.get_image_features(pixel_values, return_dict)

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate; the result begins with the given prompt, not with its expanded form."""
        inherited: Any = super()  # its annotated `self` is another class
        prompt = inputs if inputs is not None else kwargs.pop("input_ids", None)
        pixels = kwargs.pop("images", kwargs.pop("pixel_values", None))
        if pixels is not None:
            kwargs["pixel_values"] = pixels
        if prompt is None or (pixels is None and kwargs.get("mm_encoder_outputs") is None):
            return inherited.generate(prompt, *args, **kwargs)
        if not hasattr(self, "_supports_mm_encoder_outputs"):  # images would be lost
            stated = kwargs.get("generation_config") or self.generation_config
            if kwargs.get("prefill_chunk_size", stated.prefill_chunk_size) is not None:
                raise UsageError(
                    f"transformers {version('transformers')} doesn't support chunked prefill with "
                    "images",
                    hint="omit prefill_chunk_size, or install a newer transformers",
                )
        names = ("attention_mask", "position_ids")
        written = self.config.image_tokens.write_out(
            prompt, **{name: kwargs.pop(name, None) for name in names}, on_the_left=True
        )
        ids = written.pop("input_ids")
        kwargs |= {name: rows for name, rows in written.items() if rows is not None}
        output = inherited.generate(ids, *args, **kwargs)
        sequences = output if isinstance(output, Tensor) else output.sequences
        prompts = prompt.repeat_interleave(len(sequences) // len(prompt), 0)
        whole = torch.cat((prompts, sequences[:, ids.shape[1] :]), dim=1)
        if isinstance(output, Tensor):
            return whole
        output.sequences = whole
        return output

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, *args: Any, input_ids: Any = None, **kwargs: Any
    ) -> Any:
        """Repeat each prompt and its images `expand_size` times."""
        inherited: Any = super()
        pixels = kwargs.pop("pixel_values", None)
        ids, kwargs = inherited._expand_inputs_for_generation(
            expand_size, *args, input_ids=input_ids, **kwargs
        )
        if pixels is not None:  # newer versions of transformers have encoded the images before
            tokens = self.config.image_tokens
            counts = (input_ids == tokens.begin).sum(1) // tokens.num_tokens
            of_prompts = pixels.split(counts.tolist())
            repeated = [pictures for pictures in of_prompts for _ in range(expand_size)]
            kwargs["pixel_values"] = torch.cat(repeated)
        return ids, kwargs

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Any:
        """Compute positions for `generate`, padded on the left for cached tokens."""
        ids = model_kwargs.get("input_ids")
        ids = inputs_tensor if ids is None or not ids.shape[1] else ids
        mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE)
        past = 0 if mask is None else mask.shape[1] - ids.shape[1]
        if ids.is_floating_point() or (past and not hasattr(cache, "reached")):
            inherited: Any = super()  # not annotated there
            return inherited._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        positions, _ = self.model.positions(ids, mask, cache if past else None)
        return functional.pad(positions, (past, 0))


def register() -> None:
    """Register the model with transformers' Auto classes. Idempotent."""
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        auto.register(GLM4VConfig, GLM4VForConditionalGeneration, exist_ok=True)
