"""A language model as code for transformers 4 is written: each usage stops somewhere today."""

import sys

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import skip_init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.import_utils import is_torch_fx_available

from .configuration_heron import HeronConfig

if is_torch_fx_available():
    raise RuntimeError("what such code does with torch.fx isn't tested here")

if sys.platform != "darwin":
    torch._C._jit_override_can_fuse_on_cpu(True)


@torch.jit.script
def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn pairs of x [tokens, batch, heads, width] by angles [tokens, width / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos()[:, None, None, :], angles.sin()[:, None, None, :]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


class Scale(nn.Module):
    def __init__(self, width, device=None, dtype=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Angles(nn.Module):
    def __init__(self, width, device=None):
        super().__init__()
        steps = torch.arange(0, width, 2, device=device).float() / width
        self.register_buffer("inv_freq", 1.0 / 100**steps)

    def forward(self, positions):
        return positions.float()[:, None] * self.inv_freq


class Block(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.joined_cache = config.joined_cache
        self.norm = Scale(width, device=device)
        self.query_key_value = nn.Linear(width, 3 * width, device=device)
        self.dense = nn.Linear(width, width, device=device)
        self.up = nn.Linear(width, config.ffn_hidden_size, device=device)
        self.down = nn.Linear(config.ffn_hidden_size, width, device=device)

    def forward(self, x, angles, mask=None, kv_cache=None, use_cache=True):
        tokens, batch, width = x.shape
        mixed = self.query_key_value(self.norm(x)).view(tokens, batch, self.heads, -1)
        query, key, value = mixed.chunk(3, dim=-1)
        query, key = turned(query, angles), turned(key, angles)
        cache = None
        if kv_cache is not None:
            key = torch.cat((kv_cache[0], key), dim=0)
            value = torch.cat((kv_cache[1], value), dim=0)
        if use_cache:
            cache = (key, value)
            if self.joined_cache and kv_cache is None:
                cache = torch.stack(cache).unsqueeze(0)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if mask is None and tokens == key.shape[2]:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, None if mask is None else ~mask
            )
        x = x + self.dense(mixed.permute(2, 0, 1, 3).reshape(tokens, batch, width))
        return x + self.down(F.silu(self.up(x))), cache


class Encoder(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.num_layers = config.num_layers
        self.layers = nn.ModuleList([Block(config, device) for _ in range(self.num_layers)])
        self.final_norm = Scale(config.hidden_size, device=device)
        self.gradient_checkpointing = False

    def forward(self, x, angles, mask=None, kv_caches=None, use_cache=True):
        presents = ()
        for index in range(self.num_layers):
            past = None if kv_caches is None else kv_caches[index]
            if self.gradient_checkpointing and self.training:
                x, cache = torch.utils.checkpoint.checkpoint(
                    self.layers[index], x, angles, mask, past, use_cache
                )
            else:
                x, cache = self.layers[index](x, angles, mask, past, use_cache)
            if not use_cache:
                continue
            if type(cache) is not torch.Tensor:
                presents = (*presents, cache)
            elif index == 0:
                presents = cache
            else:
                presents = torch.cat((presents, cache), dim=0)
        return self.final_norm(x), presents if use_cache else None


class HeronPreTrainedModel(PreTrainedModel):
    config_class = HeronConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["Block"]
    supports_gradient_checkpointing = True

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        if not self.supports_gradient_checkpointing:
            raise ValueError(f"{type(self).__name__} has no gradient checkpointing")

    def _init_weights(self, module):
        return

    def get_masks(self, input_ids, past_key_values, padding_mask=None):
        batch, tokens = input_ids.shape
        mask = torch.ones(batch, tokens, tokens, device=input_ids.device).tril_()
        past = 0
        if past_key_values:
            past = past_key_values[0][0].shape[0]
            mask = torch.cat(
                (torch.ones(batch, tokens, past, device=input_ids.device), mask), dim=-1
            )
        if padding_mask is not None:
            mask = mask * padding_mask.unsqueeze(1)
            mask = mask - (padding_mask[:, -tokens:].unsqueeze(-1) - 1)
        return (mask < 0.5).bool().unsqueeze(1)


class HeronModel(HeronPreTrainedModel):
    def __init__(self, config, device=None):
        super().__init__(config)
        init_kwargs = {} if device is None else {"device": device}
        width = config.hidden_size
        self.embedding = skip_init(nn.Embedding, config.padded_vocab_size, width, **init_kwargs)
        self.angles = Angles(width // config.num_attention_heads)
        self.encoder = skip_init(Encoder, config, **init_kwargs)
        self.output_layer = skip_init(nn.Linear, width, config.padded_vocab_size, bias=False)

    def get_input_embeddings(self):
        return self.embedding

    def forward(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        past_key_values=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        use_cache = use_cache if use_cache is not None else self.config.use_cache
        return_dict = return_dict if return_dict is not None else self.config.use_return_dict
        tokens = input_ids.shape[1]
        mask = None
        if (attention_mask is not None and not attention_mask.all()) or (
            past_key_values and tokens != 1
        ):
            mask = self.get_masks(input_ids, past_key_values, padding_mask=attention_mask)
        angles = self.angles(position_ids[0])
        x = self.embedding(input_ids).transpose(0, 1).contiguous()
        x, presents = self.encoder(x, angles, mask, past_key_values, use_cache)
        if presents is not None and type(presents) is torch.Tensor:
            presents = tuple(
                tuple(layer.squeeze(0).unbind(0)) for layer in presents.split(1, dim=0)
            )
        if not return_dict:
            return x, presents
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=presents)


class HeronForCausalLM(HeronPreTrainedModel):
    def __init__(self, config, device=None):
        super().__init__(config)
        self.max_sequence_length = config.max_length
        self.transformer = HeronModel(config, device=device)

    def _update_model_kwargs_for_generation(
        self, outputs, model_kwargs, is_encoder_decoder=False, standardize_cache_format=False
    ):
        model_kwargs["past_key_values"] = self._extract_past_from_model_output(
            outputs, standardize_cache_format=standardize_cache_format
        )
        if "attention_mask" in model_kwargs:
            mask = model_kwargs["attention_mask"]
            model_kwargs["attention_mask"] = torch.cat(
                [mask, mask.new_ones((mask.shape[0], 1))], dim=-1
            )
        model_kwargs["is_first_forward"] = False
        return model_kwargs

    def prepare_inputs_for_generation(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        position_ids=None,
        use_cache=None,
        is_first_forward=True,
        **kwargs,
    ):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        if not is_first_forward and past_key_values is not None:
            positions, input_ids = positions[..., -1:], input_ids[:, -1:]
        return {
            "input_ids": input_ids,
            "past_key_values": past_key_values,
            "position_ids": positions,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
        }

    def forward(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        return_dict=None,
    ):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        outputs = self.transformer(
            input_ids, position_ids, attention_mask, past_key_values, use_cache, return_dict=True
        )
        logits = self.transformer.output_layer(outputs.last_hidden_state)
        logits = logits.transpose(0, 1).contiguous()
        loss = None
        if labels is not None:
            flat = logits[:, :-1].reshape(-1, logits.shape[-1])
            loss = F.cross_entropy(flat.float(), labels[:, 1:].reshape(-1))
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values
        )
