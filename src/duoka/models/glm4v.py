"""GLM-4V-9B: GLM-4-9B with a vision tower, under the published names.

The published configuration is that of the text model with a ``vision_config`` and the two tokens
around a picture. Pictures come as `pixel_values` or, as the published code calls them, `images`;
prompts with a token for each of a picture's, or with the three tokens of the published tokenizer.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.glm.modeling_glm import GlmPreTrainedModel

from .chatglm import ChatGLMConfig, ChatGLMForCausalLM, ChatGLMModel
from .eva_clip import EvaClip, EvaClipConfig
from .image_tokens import ImageTokens


@strict
class GLM4VConfig(ChatGLMConfig):
    """A configuration of the family with a ``vision_config``."""

    sub_configs = {"vision_config": EvaClipConfig}  # noqa: RUF012 (transformers' own form)

    vision_config: EvaClipConfig | dict[str, Any] | None = None
    boi_token_id: int = 151339
    eoi_token_id: int = 151340

    def __post_init__(self, **kwargs: Any) -> None:
        """Read the tower's part."""
        if not isinstance(self.vision_config, EvaClipConfig):
            self.vision_config = EvaClipConfig(**(self.vision_config or {}))
        super().__post_init__(**kwargs)

    @property
    def image_tokens(self) -> ImageTokens:
        """Where pictures are in prompts."""
        vision: Any = self.vision_config
        return ImageTokens(self.boi_token_id, self.eoi_token_id, vision.num_image_tokens)


class GLM4VModel(ChatGLMModel):
    """The decoder without its head, and the tower whose pictures it reads."""

    config: GLM4VConfig
    config_class = GLM4VConfig
    _no_split_modules = ["ChatGLMDecoderLayer", "EvaClipBlock"]  # noqa: RUF012

    def __init__(self, config: GLM4VConfig) -> None:
        super().__init__(config)
        self.vision = EvaClip(config)

    def get_image_features(self, pixel_values: Tensor, **_: Any) -> Tensor:
        """Pictures as tokens, without their beginnings and ends: [pictures, tokens, width]."""
        features: Tensor = self.vision(pixel_values)
        return features[:, 1:-1]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read tokens, and pictures in their places; see `GlmModel`.

        pixel_values [pictures, channels, height, width], in the order of the prompts' pictures
        """
        if input_ids is not None:
            if position_ids is None:
                position_ids = self._positions(input_ids, attention_mask, past_key_values)
            inputs_embeds = self.embed_tokens(input_ids)
            if pixel_values is not None:
                inputs_embeds = self._with_pictures(inputs_embeds, input_ids, pixel_values)
        outputs = super().forward(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        cache = outputs.past_key_values
        if cache is not None and position_ids is not None:
            cache.next_position = position_ids[:, -1:] + 1
        return outputs

    def _positions(self, ids: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Where tokens are that come without positions: behind those that the cache holds."""
        past = 0 if cache is None else cache.get_seq_length()
        mask = None if mask is None else mask[:, -ids.shape[1] :]
        positions = self.config.image_tokens.positions(ids, mask)
        # Not as many as the cache has tokens: those of a picture are at one position.
        return positions + getattr(cache, "next_position", past) if past else positions

    def _with_pictures(self, embeds: Tensor, ids: Tensor, pixels: Tensor) -> Tensor:
        """The embeddings with pictures in their places."""
        where = self.config.image_tokens.where(ids)
        features = self.vision(pixels.to(self.vision.boi.dtype))
        if int(where.sum()) != features.shape[:2].numel():
            raise ValueError(
                f"{len(pixels)} pictures take {features.shape[:2].numel()} tokens; the prompts "
                f"have {int(where.sum())}"
            )
        where = where[..., None].to(embeds.device)
        return embeds.masked_scatter(where, features.to(embeds))


class GLM4VForConditionalGeneration(ChatGLMForCausalLM):
    """The decoder with its language-model head, and the tower."""

    config: GLM4VConfig
    config_class = GLM4VConfig
    _no_split_modules = GLM4VModel._no_split_modules

    def __init__(self, config: GLM4VConfig) -> None:
        GlmPreTrainedModel.__init__(self, config)
        self.model = GLM4VModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        pixel_values: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Read tokens and pictures; see `GlmForCausalLM` and `GLM4VModel`.

        Logits and labels are those of prompts that are written out.
        """
        pixel_values = kwargs.pop("images", pixel_values)
        if pixel_values is not None and input_ids is not None:
            tokens = self.config.image_tokens
            if not tokens.written_out(input_ids):
                position_ids = None
                input_ids, attention_mask, labels = tokens.write_out(
                    input_ids, attention_mask, labels
                )
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            pixel_values=pixel_values,
            **kwargs,
        )

    def get_image_features(self, pixel_values: Tensor, **_: Any) -> Tensor:
        """Pictures as tokens; see `GLM4VModel`."""
        features: Tensor = self.model.get_image_features(pixel_values)
        return features

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate; what is returned begins with the prompt as it was given."""
        inherited: Any = super()  # whose type asks for another class
        prompt = inputs if inputs is not None else kwargs.pop("input_ids", None)
        if "images" in kwargs:
            kwargs["pixel_values"] = kwargs.pop("images")
        pixels = kwargs.get("pixel_values")
        tokens = self.config.image_tokens
        if prompt is None or pixels is None or tokens.written_out(prompt):
            return inherited.generate(prompt, *args, **kwargs)
        ids, kwargs["attention_mask"], _ = tokens.write_out(prompt, kwargs.get("attention_mask"))
        output = inherited.generate(ids, *args, **kwargs)
        sequences = output if isinstance(output, Tensor) else output.sequences
        answers = sequences[:, ids.shape[1] :]
        prompts = prompt.repeat_interleave(len(sequences) // len(prompt), 0)
        whole = torch.cat((prompts, answers), dim=1)
        if isinstance(output, Tensor):
            return whole
        output.sequences = whole
        return output

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Any:
        """Positions of all tokens, those in the cache too; `generate` counts on from the last."""
        ids = model_kwargs.get("input_ids")
        ids = inputs_tensor if ids is None or not ids.shape[1] else ids
        if ids.is_floating_point():
            inherited: Any = super()  # without types there
            return inherited._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        return self.config.image_tokens.positions(ids, model_kwargs.get("attention_mask"))

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What a step is called with: pictures come with the prompt."""
        inherited: Any = super()  # whose type asks for another class
        inputs: dict[str, Any] = inherited.prepare_inputs_for_generation(*args, **kwargs)
        if not kwargs.get("is_first_iteration") and kwargs.get("use_cache", True):
            inputs.pop("pixel_values", None)
        return inputs


def register() -> None:
    """Make transformers' Auto classes know the model. Idempotent."""
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        auto.register(GLM4VConfig, GLM4VForConditionalGeneration, exist_ok=True)
