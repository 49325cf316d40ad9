"""A tokenizer as code of 2023 is written: the base class is made before there is a vocabulary."""

from pathlib import Path

from transformers import AddedToken, PreTrainedTokenizer


class HeronTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "heron.letters"}
    model_input_names = ["input_ids", "attention_mask", "position_ids"]

    def __init__(self, vocab_file, eos_token="<end>", unk_token="<none>", **kwargs):
        super().__init__(
            eos_token=AddedToken(eos_token, lstrip=False, rstrip=False),
            unk_token=unk_token,
            **kwargs,
        )
        self.vocab_file = vocab_file
        self.letters = Path(vocab_file).read_text().splitlines()

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {letter: index for index, letter in enumerate(self.letters)}

    def _tokenize(self, text):
        return list(text.replace(" ", "_"))

    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).replace("_", " ")

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [1, *token_ids_0, *(token_ids_1 or [])]

    def _pad(
        self,
        encoded_inputs,
        max_length=None,
        padding_strategy="do_not_pad",
        pad_to_multiple_of=None,
        return_attention_mask=None,
    ):
        ids = encoded_inputs["input_ids"]
        gap = max(0, (max_length or 0) - len(ids))
        return {
            "input_ids": [0] * gap + ids,
            "attention_mask": [0] * gap + [1] * len(ids),
            "position_ids": [0] * gap + list(range(len(ids))),
        }

    def build_chat_input(self, query):
        ids = [self._convert_token_to_id(token) for token in self._tokenize(query)]
        return self.batch_encode_plus([ids], return_tensors="pt", is_split_into_words=True)
