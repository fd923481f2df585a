"""A tokenizer from the metadata of a GGUF file: vocabulary, merges, the way text is split, special tokens, template.

What does not live here: the reading of the file (`reference_server.model.gguf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from reference_server.text.tokenizer import Tokenizer, TokenizerError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type that matter here (the GGUF specification); 1 is an ordinary token, 5 an unused one."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Llama 3 and Qwen2 cut text into words before merging; they differ in how many digits go together."""


@attrs.frozen
class Cutting:
    """How a text is cut into words before merging.

    words: a pattern; None for the one of GPT-2, which the library has built in. digits: each digit is a word of its own, beforehand.
    whole: a word that is in the vocabulary is one token, whatever the merges say. starts: a start token is put before every
    text where the file does not say, as llama.cpp has it. normal_form: Unicode NFC first.
    """

    words: str | None = None
    digits: bool = False
    whole: bool = False
    starts: bool = False
    normal_form: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The same for the library; bytes as letters at its end."""
        before: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        if self.words is not None:
            before.append(pre_tokenizers.Split(Regex(self.words), behavior="isolated"))
        return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.words is None)])


CUTTINGS = {
    "gpt-2": Cutting(),
    "smollm": Cutting(digits=True),
    "llama-bpe": Cutting(words=_WORDS % r"\p{N}{1,3}", whole=True, starts=True),
    "qwen2": Cutting(words=_WORDS % r"\p{N}", normal_form=True),
}
"""Known values of tokenizer.ggml.pre."""


def from_metadata(meta: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that keys tokenizer.* of a GGUF file describe. Raises `TokenizerError` naming the key.

    A byte-level vocabulary with merges (tokenizer.ggml.model gpt2) cut in one of the ways of `CUTTINGS`; others are refused.
    """
    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model must be gpt2, not {model!r}")
    if pre not in CUTTINGS:
        raise TokenizerError(f"tokenizer.ggml.pre must be one of {', '.join(CUTTINGS)}, not {pre!r}")
    if meta.get("tokenizer.ggml.add_eos_token", False) is not False:
        raise TokenizerError("tokenizer.ggml.add_eos_token must be false: an end token after a prompt leaves nothing to say")
    tokens = _strings(meta, "tokenizer.ggml.tokens")
    vocab = {token: key for key, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.tokens names {len(tokens) - len(vocab)} tokens twice")
    cutting = CUTTINGS[pre]
    backend = Backend(models.BPE(vocab, _merges(meta, vocab), ignore_merges=cutting.whole))
    if cutting.normal_form:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cutting.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    types = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.token_type must be a list of {len(tokens)} integers, one for each token")
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True)
                                for token, kind in zip(tokens, types, strict=True) if kind in (UNKNOWN, CONTROL)])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED])
    if meta.get("tokenizer.ggml.add_bos_token", cutting.starts):
        start = token_id(meta, "tokenizer.ggml.bos_token_id", len(tokens))
        if start is None:
            raise TokenizerError("tokenizer.ggml.bos_token_id is absent, and a start token is wanted before every text")
        backend.post_processor = processors.TemplateProcessing(single=f"{tokens[start]} $A", special_tokens=[(tokens[start], start)])
    template = meta.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"tokenizer.chat_template must be a string, not {type(template).__name__}")
    return Tokenizer(backend, template=template, names=_names(meta, tokens))


def end_tokens(meta: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Ids that end an answer: end of sequence, and end of turn where it is another."""
    found = (token_id(meta, f"tokenizer.ggml.{name}_token_id", vocab_size) for name in ("eos", "eot"))
    return frozenset(one for one in found if one is not None)


def token_id(meta: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    """A token id of the metadata, or None where the key is absent. Raises `TokenizerError` for one out of range."""
    value = meta.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size):
        raise TokenizerError(f"{key} must be an integer from 0 to {vocab_size - 1}, not {value!r}")
    return value


def _names(meta: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """Special tokens as chat templates call them."""
    known = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: token_id(meta, f"tokenizer.ggml.{key}_token_id", len(tokens)) for name, key in known.items()}
    return {name: tokens[found] for name, found in ids.items() if found is not None}


def _merges(meta: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs to merge, best first. The letters of a byte-level vocabulary hold no space, so one separates a pair."""
    found: list[tuple[str, str]] = []
    for merge in _strings(meta, "tokenizer.ggml.merges"):
        first, space, second = merge.partition(" ")
        if not space or first not in vocab or second not in vocab or first + second not in vocab:
            raise TokenizerError(f"tokenizer.ggml.merges holds {merge!r}, which is no pair of tokens that make a token")
        found.append((first, second))
    return found


def _strings(meta: Mapping[str, Any], key: str) -> list[str]:
    value = meta.get(key)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TokenizerError(f"{key} must be a list of strings, not {type(value).__name__}")
    return value
