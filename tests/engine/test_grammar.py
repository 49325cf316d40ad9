"""Grammars: what is allowed is what they say, over every kind of tokenizer; the rest is refused."""

from __future__ import annotations

import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tuning
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from duoka.engine.grammar import BytesDetokenizer, Grammar, GrammarCompiler, GrammarMatcher
from duoka.errors import UsageError
from duoka.models.text.call_grammars import force_call
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.text.tokenizer import load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ü"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PIECES = ['{"', '":', ' "', "na", "me", "ag", "e", " a", "b", "ab", "12", "ü", "你好"]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Pieces with ▁ for a space, and the other bytes by themselves, as Llama 2 has them."""
    pieces = [piece.replace(" ", "▁") for piece in PIECES]
    texts = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *pieces]
    letters = {letter for piece in pieces for letter in piece}
    vocabulary = {text: token for token, text in enumerate(dict.fromkeys([*texts, *letters]))}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<|user|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte, some for several, and special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary, merges = {letter: token for token, letter in enumerate(alphabet)}, []
    for piece in PIECES:
        ((text, _),) = cut.pre_tokenize_str(piece)
        for end in range(2, len(text) + 1):
            if text[:end] not in vocabulary:
                merges.append((text[: end - 1], text[end - 1]))
                vocabulary[text[:end]] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer, backend.decoder = cut, decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", additional_special_tokens=["<|user|>"]
    )


@pytest.fixture(scope="module", params=["bytes", "byte_level", "sentencepiece", "chatglm3", "glm4"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    makers = {
        "bytes": tuning.make_tokenizer,
        "byte_level": byte_level,
        "sentencepiece": sentencepiece_like,
    }
    if request.param in makers:
        return makers[request.param]()
    shared: Path = request.getfixturevalue("shared_data")
    name = {"chatglm3": "chatglm3-6b", "glm4": "glm-4-9b-chat"}[request.param]
    config = {"model_type": "chatglm"}
    return load_tokenizer(shared / "tokenizers" / name, config, native=ChatGLMTokenizer)


@pytest.fixture(scope="module")
def stop(tokenizer: PreTrainedTokenizerBase) -> int:
    assert isinstance(tokenizer.eos_token_id, int)
    return tokenizer.eos_token_id


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase, stop: int) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, [stop], None)


def tokens_of(matcher: GrammarMatcher) -> list[int]:
    octets = np.frombuffer(matcher.allowed, dtype=np.uint8)
    tokens: list[int] = np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
    return tokens


def walk(
    matcher: GrammarMatcher, detokenizer: BytesDetokenizer, stop: int, rng: random.Random
) -> str:
    """An answer at random, which ends as soon as it can."""
    text = ""
    for _ in range(500):
        allowed = tokens_of(matcher)
        if matcher.is_complete or stop in allowed:
            return text + detokenizer.finish()
        token = rng.choice(allowed)
        matcher.advance(token)
        text += detokenizer.add(token)
    return ""


def test_answers_fit_a_schema(compiler: GrammarCompiler, stop: int) -> None:
    rng = random.Random(0)
    grammar = Grammar.json_schema(SCHEMA)
    answers = [walk(*compiler.start(grammar), stop, rng) for _ in range(30)]
    for answer in answers:
        jsonschema.validate(json.loads(answer), SCHEMA)
    assert len(set(answers)) > 20


@pytest.mark.parametrize("pattern", ["(ab|b)*ü?e", r"[0-9]{3}-[a-e]+", " *a", r"(?s:.){4}"])
def test_answers_match_an_expression(compiler: GrammarCompiler, stop: int, pattern: str) -> None:
    rng = random.Random(0)
    answers = [walk(*compiler.start(Grammar.regex(pattern)), stop, rng) for _ in range(20)]
    for answer in answers:
        assert re.fullmatch(pattern, answer)
    assert len(set(answers)) > 2 or pattern == " *a"


def test_any_object(compiler: GrammarCompiler, tokenizer: Any) -> None:
    text = '{"name": [1, {"ü": 2}], "b": "你好 <|user|>"}'
    matcher, detokenizer = compiler.start(Grammar.json_object())
    ids = [token for letter in text for token in single(tokenizer, letter)]
    written = ""
    for token in ids:
        assert token in tokens_of(matcher), (written, tokenizer.convert_ids_to_tokens(token))
        matcher.advance(token)
        written += detokenizer.add(token)
    assert written + detokenizer.finish() == text
    assert matcher.is_complete


ANY_KEYS = {"type": "object", "x-guidance": {"lenient": True}}
TOOLS = [{"name": "a", "parameters": {"type": "object"}, "strict": strict} for strict in (0, 1)]
OF_TOOLS = [force_call(None, [tool], byte_level(), before="", parallel=False) for tool in TOOLS]


@pytest.mark.parametrize(
    ("grammar", "start"),
    [
        (Grammar.json_object(), ""),
        (Grammar.json_schema(ANY_KEYS), ""),
        *((Grammar.lark(call.grammar), '{"name": "a", "arguments": ') for call in OF_TOOLS),
    ],
)
def test_white_space_in_json_has_an_end(grammar: Grammar, start: str) -> None:
    tokenizer: Any = byte_level()
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], None)
    spaces = {tokenizer.encode(space)[0] for space in " \n\t\r"}
    content = '{"a": [1, {"b": true}, []], "c": "d"}'
    for end in range(1, len(content)):
        matcher, _ = compiler.start(grammar)
        for letter in start + content[:end]:
            for token in single(tokenizer, letter):
                matcher.advance(token)
        number, is_text = 0, content[:end].count('"') % 2
        while not is_text and number < 30 and (blank := spaces & {*tokens_of(matcher)}):
            matcher.advance(min(blank))
            number += 1
        assert number <= 21
        assert tokens_of(matcher)


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_json_that_is_written_as_usual_is_allowed(indent: int | str | None) -> None:
    tokenizer: Any = byte_level()
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], None)
    content = {"a": [1, {"b": True, "c": [{"d": None}]}], "e": {}}
    matcher, _ = compiler.start(Grammar.json_object())
    for letter in json.dumps(content, indent=indent):
        for token in single(tokenizer, letter):
            assert token in tokens_of(matcher)
            matcher.advance(token)
    assert matcher.is_complete


def single(tokenizer: Any, letter: str) -> list[int]:
    """The tokens of a letter, or of its bytes."""
    vocabulary = tokenizer.get_vocab()
    if f"<0x{0:02X}>" in vocabulary:
        token = vocabulary.get(letter.replace(" ", "▁"))
        octets = [vocabulary[f"<0x{byte:02X}>"] for byte in letter.encode()]
        return octets if token is None else [token]
    ids: list[int] = tokenizer.encode(letter, add_special_tokens=False)
    return ids


def test_what_is_allowed_is_what_can_still_become_an_answer() -> None:
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], None)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    pieces = {text for text in texts.values() if text and set(text) <= set("abe")}
    for pattern in ("(ab|b){1,3}", "a?b?a?e{0,2}", "(a|b(e|ab)){0,2}"):
        words = {"".join(word) for size in range(7) for word in product("abe", repeat=size)}
        words = {word for word in words if re.fullmatch(pattern, word)}
        for prefix in {word[:end] for word in words for end in range(7)}:
            matcher, _ = compiler.start(Grammar.regex(pattern))
            for letter in prefix:
                matcher.advance(tokenizer.convert_tokens_to_ids(letter))
            following = {texts[token] for token in tokens_of(matcher)}
            expected = {
                text for text in pieces if any(word.startswith(prefix + text) for word in words)
            } | ({tokenizer.eos_token} if prefix in words else set())
            # Where only one text can follow, its tokens are the tokenizer's own.
            assert following == expected or (len(following) == 1 and following < expected)


def test_special_tokens_are_never_text(
    compiler: GrammarCompiler, tokenizer: PreTrainedTokenizerBase, stop: int
) -> None:
    special = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(["<|user|>"])}
    matcher, _ = compiler.start(Grammar.regex(r"(?s:.)*"))
    assert special & {*tokens_of(matcher)} == {stop}
    matcher, _ = compiler.start(Grammar.regex(r"(?s:.)+"))
    assert not special & {*tokens_of(matcher)}
    for name in ("<|user|>", f"<[{stop}]>"):
        with pytest.raises(UsageError, match="no text token satisfies it"):
            compiler.start(Grammar.lark(f'start: {name} "a"'))


def test_what_ends_an_answer_is_no_text_of_it() -> None:
    tokenizer = byte_level()
    stop, a = tokenizer.convert_tokens_to_ids(["!", "a"])
    for stop_ids, last in (([stop], stop), ([], len(tokenizer) - 1)):
        compiler = GrammarCompiler(tokenizer, stop_ids, None)
        matcher, detokenizer = compiler.start(Grammar.regex(r"(?s:.)+b?"))
        assert last not in tokens_of(matcher)
        matcher.advance(a)
        assert (stop in tokens_of(matcher)) or not stop_ids
        assert detokenizer.add(a) == "a"
        matcher, _ = compiler.start(Grammar.regex("a"))
        matcher.advance(a)
        assert matcher.is_complete
        assert tokens_of(matcher) == stop_ids


def test_tokens_that_the_model_lacks_are_not_allowed(tokenizer: PreTrainedTokenizerBase) -> None:
    compiler = GrammarCompiler(tokenizer, [], 200)
    matcher, _ = compiler.start(Grammar.regex(r"(?s:.)*"))
    assert 100 < max(tokens_of(matcher)) < 200


REFUSED: list[tuple[Any, str]] = [
    (lambda: Grammar.regex("(ab"), r"the regex '\(ab' can't be compiled: error: unclosed group"),
    (lambda: Grammar.regex("(?=a)b"), "look-around"),
    (lambda: Grammar.regex("a" * 40_000), "has 40000 characters; at most 32768"),
    (lambda: Grammar.lark("start: a"), 'unknown name: "a"'),
    (lambda: Grammar.json_schema({"type": "strin"}), "Invalid type: strin"),
    (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    (lambda: Grammar.json_schema({"$ref": "http://localhost/x"}), "does not fetch resources"),
    (lambda: Grammar.json_schema('{"a": 1, "a": 2}'), "the key 'a' occurs twice"),
    (lambda: Grammar.json_schema("[1"), "is not a JSON object"),
    (lambda: Grammar.json_schema('{"a":' * 5000 + "1" + "}" * 5000), "nested too deeply"),
    (lambda: Grammar.json_schema('{"items":' * 200 + "{}" + "}" * 200), "recursion limit"),
    (lambda: Grammar.json_schema({"a": {1}}), "not JSON serializable"),
    (lambda: Grammar.from_response_format({"type": "xml"}), "'xml'.*unknown"),
    (lambda: Grammar.from_response_format("json_object"), "json_object.*unknown"),
    (lambda: Grammar.from_response_format({"type": "regex", "regex": 1}), "unknown"),
    (lambda: Grammar.from_response_format({"type": "json_object", "x": 1}), "unknown"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        make()
    assert refusal.value.hint
    assert "\n" not in str(refusal.value)


def chain(size: int, kind: str) -> Grammar:
    """A grammar in which each part refers to the next one."""
    if kind == "lark":
        rules = [f"r{number}: (r{number + 1})?" for number in range(size)]
        return Grammar.lark("\n".join(["start: r0", *rules, f'r{size}: "a"']))
    parts = {f"{number}": {"items": {"$ref": f"#/$defs/{number + 1}"}} for number in range(size)}
    return Grammar.json_schema({"$ref": "#/$defs/0", "$defs": {**parts, f"{size}": {}}})


@pytest.mark.parametrize("kind", ["lark", "json_schema"])
def test_a_long_chain_is_refused_before_it_takes_all_of_the_stack(kind: str) -> None:
    tokenizer = byte_level()
    compiler = GrammarCompiler(tokenizer, [tokenizer.eos_token_id], None)
    assert tokens_of(compiler.start(chain(490, kind))[0])
    with pytest.raises(UsageError, match=r"references or rules; at most 500"):
        chain(501, kind)
    with pytest.raises(UsageError, match="references or rules; at most 500"):
        Grammar.lark("start: %lark { " * 501 + 'start: "a"' + " }" * 501)


def test_a_tokenizer_whose_bytes_are_unknown_is_refused() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    backend.decoder = decoders.WordPiece()
    words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    with pytest.raises(UsageError, match="can't be constrained by a grammar"):
        GrammarCompiler(words, [], None).start(Grammar.regex("a"))


def test_response_formats() -> None:
    form = Grammar.from_response_format
    assert form({"type": "text"}) is None
    assert form({"type": "json_object"}) == Grammar.json_object()
    described = {"name": "person", "strict": True, "schema": SCHEMA}
    asked = form({"type": "json_schema", "json_schema": described})
    assert asked == Grammar.json_schema(SCHEMA)
    assert form({"type": "regex", "regex": "a+"}) == Grammar.regex("a+")
    assert form({"type": "lark", "lark": 'start: "a"'}) == Grammar.lark('start: "a"')
