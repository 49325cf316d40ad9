"""A subclass of a model of transformers that fails only while it generates.

Once there is a cache, its logits are divided by penalties that are kept on the CPU. There are no
example inputs: a check runs the prompt and decode steps by itself.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class PenalisedLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.penalties = [torch.ones(config.vocab_size)]

    def forward(self, input_ids=None, past_key_values=None, **options):
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        out = super().forward(input_ids=input_ids, past_key_values=past_key_values, **options)
        if past > 0:
            out.logits = out.logits / self.penalties[0]  # fault: mixed-devices
        return out


PLACEMENT = {
    "model.embed_tokens": 0,
    "model.rotary_emb": 0,
    "model.layers.0": 0,
    "model.layers.1": 1,
    "model.norm": 1,
    "lm_head": 1,
}
TRAIN = False
UNJUDGED = "without inputs only a check knows how to run it"


def build():
    return PenalisedLlama(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def inputs():
    return None
