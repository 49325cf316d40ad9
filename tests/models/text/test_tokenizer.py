"""Fast tokenizers against sentencepiece and tiktoken themselves."""

from __future__ import annotations

import base64
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from fuzzing import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from duoka.checkpoint import tokenizer_files, vocabulary
from duoka.errors import CheckpointError
from duoka.models.text.tokenizer import encode, load_tokenizer, special_id

TEXTS = [
    "", " ", "  two  spaces  ", "\n\n\t tabs\r\n", "你好，世界！",
    "日本語 한국어 ไทย العربية हिन्दी",
    "👩‍👩‍👧‍👦🏳️‍🌈😀", "def f(x):\n    return x ** 2  # ok\n", "ﬁ Å Å ½ ①", "▁▁ a▁b",
    "1234567890 3.14e-10", "<|user|>\n hi", "[gMASK]sop<sop></s><unk><0x0A><|endoftext|>",
    "\x00\x01\u200b\u202e", "a" * 300, " " * 100, "I'll we'RE don't", "𝕳𝖊𝖑𝖑𝖔",
    "！？。，、；：", "\ufeffBOM",
]  # fmt: skip


@pytest.fixture(scope="module")
def chatglm3(shared_data: Path, published_data: Path) -> PreTrainedTokenizerBase:
    config = json.loads((published_data / "configs" / "chatglm3-6b.json").read_text())
    return load_tokenizer(shared_data / "tokenizers" / "chatglm3-6b", config)


@pytest.fixture(scope="module")
def glm4(shared_data: Path, published_data: Path) -> PreTrainedTokenizerBase:
    config = json.loads((published_data / "configs" / "glm-4-9b-chat.json").read_text())
    return load_tokenizer(shared_data / "tokenizers" / "glm-4-9b-chat", config)


@pytest.fixture(scope="module")
def slow_chatglm3(shared_data: Path) -> Any:
    file = shared_data / "tokenizers" / "chatglm3-6b" / "tokenizer.model"
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


@pytest.fixture(scope="module")
def slow_glm4(shared_data: Path) -> Any:
    file = shared_data / "tokenizers" / "glm-4-9b-chat" / "tokenizer.model"
    lines = (line.split() for line in file.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding(
        "glm4", pat_str=vocabulary._GLM4_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


def plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def corpus(shared_data: Path) -> list[str]:
    """Real text in pieces of all lengths: this project's own words, code and Chinese."""
    text = Path(__file__).read_text() + Path(vocabulary.__file__).read_text()
    for path in shared_data.rglob("tokenizer_config.json"):
        text += path.read_text()
    pieces, at = [], 0
    for length in (n % 97 + 1 for n in range(0, 100_000, 7)):
        pieces.append(text[at : at + length])
        at += length
    return [piece for piece in pieces if piece]


def test_chatglm3_equals_sentencepiece(
    shared_data: Path, chatglm3: PreTrainedTokenizerBase, slow_chatglm3: Any
) -> None:
    for text in [*TEXTS, *corpus(shared_data)]:
        ids = plain(chatglm3, text)
        assert ids == slow_chatglm3.encode(text), text
        assert chatglm3.decode(ids) == slow_chatglm3.decode(ids), text


def test_glm4_equals_tiktoken(
    shared_data: Path, glm4: PreTrainedTokenizerBase, slow_glm4: Any
) -> None:
    for text in [*TEXTS, *corpus(shared_data)]:
        ids = plain(glm4, text)
        assert ids == slow_glm4.encode(text, disallowed_special=()), text
        assert glm4.decode(ids) == text


@settings(deadline=None, max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_round_trips(
    chatglm3: PreTrainedTokenizerBase,
    glm4: PreTrainedTokenizerBase,
    slow_chatglm3: Any,
    slow_glm4: Any,
    text: str,
) -> None:
    assert plain(glm4, text) == slow_glm4.encode(text, disallowed_special=())
    assert glm4.decode(plain(glm4, text)) == text
    assert plain(chatglm3, text) == slow_chatglm3.encode(text)
    if "▁" not in text:
        assert chatglm3.decode(plain(chatglm3, text)) == text


def test_special_tokens_have_the_published_ids(
    chatglm3: PreTrainedTokenizerBase, glm4: PreTrainedTokenizerBase
) -> None:
    names = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *tokenizer_files._ROLES]
    assert [special_id(chatglm3, name) for name in names] == list(range(64789, 64798))
    assert [special_id(glm4, name) for name in tokenizer_files._GLM4_SPECIAL] == list(
        range(151329, 151343)
    )
    assert (chatglm3.unk_token_id, chatglm3.pad_token_id) == (0, 0)
    assert (chatglm3.bos_token_id, chatglm3.eos_token_id) == (1, 2)
    assert (glm4.eos_token_id, glm4.pad_token_id) == (151329, 151329)
    with pytest.raises(CheckpointError, match="nothing"):
        special_id(chatglm3, "<|nothing|>")
    with pytest.raises(CheckpointError, match="nothing"):
        special_id(glm4, "<|nothing|>")


def test_text_starts_as_published_and_pads_on_the_left(
    chatglm3: PreTrainedTokenizerBase, glm4: PreTrainedTokenizerBase
) -> None:
    assert chatglm3("你好").input_ids == [64790, 64792, 36474, 54591]
    assert glm4("你好").input_ids == [151331, 151333, 109377]
    batch = glm4(["你好", "你好，多卡"], padding=True)
    assert batch["input_ids"][0][0] == glm4.pad_token_id
    assert batch["attention_mask"][0][0] == 0


def test_nobody_types_a_special_token(
    chatglm3: PreTrainedTokenizerBase, glm4: PreTrainedTokenizerBase
) -> None:
    for tokenizer, first in ((chatglm3, 64789), (glm4, 151329)):
        text = "".join(tokenizer.get_added_vocab())
        assert max(plain(tokenizer, text)) < first
        assert 0 not in plain(chatglm3, "<unk>")
        asked = tokenizer.encode("<|user|>", add_special_tokens=False, split_special_tokens=False)
        assert asked == [special_id(tokenizer, "<|user|>")]


@pytest.mark.slow
def test_saved_tokenizers_load_again(
    chatglm3: PreTrainedTokenizerBase, glm4: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for tokenizer in (chatglm3, glm4):
        tokenizer.save_pretrained(tmp_path)
        again = load_tokenizer(tmp_path, {"model_type": "chatglm"})
        assert again("多卡 <|user|>").input_ids == tokenizer("多卡 <|user|>").input_ids
        assert again.padding_side == "left"
        assert AutoTokenizer.from_pretrained(tmp_path)("hi").input_ids == tokenizer("hi").input_ids


def copy_of(shared_data: Path, name: str, directory: Path) -> Path:
    for file in (shared_data / "tokenizers" / name).iterdir():
        shutil.copyfile(file, directory / file.name)
    return directory


@pytest.mark.parametrize(
    ("config", "code", "expected"),
    [
        ({"_name_or_path": "THUDM/chatglm2-6b"}, None, False),
        ({"_name_or_path": "THUDM/chatglm3-6b"}, None, True),
        ({"seq_length": 32768}, None, False),
        ({"seq_length": 32768, "rope_ratio": 16}, None, False),
        ({"seq_length": 32768, "rope_ratio": 50}, None, True),
        ({"seq_length": 8192}, None, True),
        ({"seq_length": 8192}, 'special = ["sop", "eop"]', False),
        ({"seq_length": 32768}, 'special = ["sop", "<|user|>"]', True),
    ],
)
def test_chatglm2_has_no_roles(
    shared_data: Path, tmp_path: Path, config: dict[str, Any], code: str | None, expected: bool
) -> None:
    directory = copy_of(shared_data, "chatglm3-6b", tmp_path)
    (directory / "tokenizer_config.json").write_text("{}")
    if code is not None:
        (directory / "tokenization_chatglm.py").write_text(code)
    tokenizer = load_tokenizer(directory, {"model_type": "chatglm", **config})
    assert ("<|user|>" in tokenizer.get_added_vocab()) is expected
    assert special_id(tokenizer, "eop") == 64793


@pytest.mark.slow
def test_added_tokens_of_glm4_must_count_on(shared_data: Path, tmp_path: Path) -> None:
    directory = copy_of(shared_data, "glm-4-9b-chat", tmp_path)
    settings_file = directory / "tokenizer_config.json"
    for hostile in ({"5": {"content": "x"}}, {"a": {}}, [], {"151329": None}):
        settings_file.write_text(json.dumps({"added_tokens_decoder": hostile}))
        with pytest.raises(CheckpointError, match="added"):
            load_tokenizer(directory, {"model_type": "chatglm"})
    settings_file.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        load_tokenizer(directory, {"model_type": "chatglm"})


def train(directory: Path, **options: Any) -> Path:
    text = directory / "text.txt"
    words = "two cards are better than one 两张卡 比 一张 好 " + "".join(map(chr, range(33, 127)))
    text.write_text("\n".join(f"{words} {n}" for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    return directory


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {},
        {"add_dummy_prefix": False, "user_defined_symbols": ["<tool>"]},
    ],
)
def test_any_sentencepiece_byte_pair_encoding(tmp_path: Path, options: dict[str, Any]) -> None:
    directory = train(tmp_path, **options)
    slow = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    tokenizer = load_tokenizer(directory, {"model_type": "chatglm"})
    assert special_id(tokenizer, "[gMASK]") == 401
    for text in ("two cards", "  two   cards ", "ﬁ ½ 两张卡 好", "a<tool>b", "😀 x"):
        assert plain(tokenizer, text) == slow.encode(text), text


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "tokenizer.json"])
def test_files_that_are_far_too_large(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(CheckpointError, match=r"at most .* are read"):
        load_tokenizer(tmp_path, {"model_type": "llama"})


@pytest.mark.parametrize("model_type", ["chatglm", "llama"])
def test_a_directory_without_a_tokenizer(model_type: str, tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="has no tokenizer") as caught:
            load_tokenizer(directory, {"model_type": model_type})
        assert caught.value.hint


def test_two_threads_never_encode_at_once() -> None:
    """Whether special tokens are split is a state of the tokenizer, set by each call."""

    class Slow:
        splits: bool

        def encode(
            self, text: str, *, add_special_tokens: bool, split_special_tokens: bool
        ) -> list[int]:
            self.splits = split_special_tokens
            time.sleep(0.02)
            return [int(self.splits)]

    tokenizer: Any = Slow()
    with ThreadPoolExecutor(8) as pool:
        asked = [number % 2 == 0 for number in range(8)]
        answers = pool.map(lambda splits: encode(tokenizer, "a", splits=splits), asked)
        assert [bool(ids[0]) for ids in answers] == asked
