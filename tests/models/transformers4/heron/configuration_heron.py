from transformers import PretrainedConfig


class HeronConfig(PretrainedConfig):
    model_type = "heron"

    def __init__(
        self,
        num_layers=4,
        padded_vocab_size=96,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        seq_length=128,
        joined_cache=False,
        **kwargs,
    ):
        self.num_layers = num_layers
        self.vocab_size = padded_vocab_size
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.num_attention_heads = num_attention_heads
        self.seq_length = seq_length
        self.joined_cache = joined_cache
        super().__init__(**kwargs)
