from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_pebble import PebbleConfig
from .helpers_pebble import causal_bias, rotated


class PebbleLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.index = index
        self.num_heads = config.num_heads
        self.norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, hidden, bias, past_key_values=None):
        batch, tokens, width = hidden.shape
        mixed = self.query_key_value(self.norm(hidden))
        parts = mixed.view(batch, tokens, self.num_heads, -1).transpose(1, 2).chunk(3, dim=-1)
        query, key, value = rotated(parts[0]), rotated(parts[1]), parts[2]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.index)
        scores = query @ key.transpose(-1, -2) + bias
        context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, tokens, width)
        return hidden + self.dense(context)


class PebblePreTrainedModel(PreTrainedModel):
    config_class = PebbleConfig
    base_model_prefix = "transformer"
    _no_split_modules = ("PebbleLayer",)


class PebbleModel(PebblePreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(PebbleLayer(config, i) for i in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.post_init()

    def forward(self, input_ids, past_key_values=None):
        hidden = self.embedding(input_ids)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        bias = causal_bias(hidden, past)
        for layer in self.layers:
            hidden = layer(hidden, bias, past_key_values)
        return self.final_norm(hidden)


class PebbleForCausalLM(PebblePreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.transformer = PebbleModel(config)
        self.output_layer = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, past_key_values=None, labels=None, **kwargs):
        logits = self.output_layer(self.transformer(input_ids, past_key_values))
        loss = None
        if labels is not None:
            wanted = labels[:, 1:].to(logits.device)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
