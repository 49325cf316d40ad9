from transformers import PretrainedConfig


class PebbleConfig(PretrainedConfig):
    model_type = "pebble"

    def __init__(self, width=32, num_layers=4, num_heads=4, vocab_size=64, **kwargs):
        self.width = width
        self.hidden_size = width
        self.num_layers = num_layers
        self.num_hidden_layers = num_layers
        self.num_heads = num_heads
        self.num_attention_heads = num_heads
        self.vocab_size = vocab_size
        super().__init__(**kwargs)
