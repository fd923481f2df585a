"""Text to token ids and back, over the `tokenizers` library; a tokenizer of a model directory.

What does not live here: tokenizers of GGUF files (`metadata`), text that comes token by token (`stream`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from reference_server.text.chat import ChatError, ChatTemplate

SENTENCE_PIECE = ["Replace", "ByteFallback", "Fuse", "Strip"]
"""Decoders, in order, of a tokenizer.json that was a SentencePiece model."""

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode keeps out of text; one of them marks a place in it for a moment."""

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What chat templates call special tokens."""


class TokenizerError(ValueError):
    """A tokenizer's files, or a text, cannot be used. The message names what, and what is allowed."""


def byte_alphabet() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (the convention of GPT-2).

    Printable Latin-1 stands for itself; the other bytes take the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        letters.setdefault(byte, chr(0x100 + byte - sum(other < byte for other in printable)))
    return [letters[byte] for byte in range(256)]


class Tokenizer:
    """Text to token ids and back.

    backend: a tokenizer whose decoder is byte-level, or that of a SentencePiece model with byte fallback; another raises
    `TokenizerError`. template: the model's chat template, if it has one. names: special tokens by their template names.

    Every token is bytes, special ones none, so text can be put together token by token: bytes that are no UTF-8 become
    U+FFFD, as Python and Rust agree. Safe to use from several threads. Cost: O(vocabulary) once.
    """

    def __init__(self, backend: Backend, *, template: str | None = None, names: Mapping[str, str] | None = None) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._strip = _is_sentence_piece(backend)
        self._special = {token.content: key for key, token in backend.get_added_tokens_decoder().items() if token.special}
        self._bytes = _byte_table(backend, set(self._special.values()), sentence_piece=self._strip)
        try:
            self._template = None if template is None else ChatTemplate(template, names)
        except ValueError as fault:
            raise TokenizerError(str(fault)) from fault

    @property
    def vocab_size(self) -> int:
        """Ids are below this. A model's output matrix may be larger: it is often padded."""
        return len(self._bytes)

    @property
    def special(self) -> Mapping[str, int]:
        """Special tokens, text to id. They control the model and are no text of its answer."""
        return self._special

    @property
    def has_chat(self) -> bool:
        """Whether `chat` can work."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt as its author wrote it.

        A special token spelled out in it is that token, and what the model's files put before every text (a start token,
        for some) is put. That is how servers of open models read a completion's prompt: its author writes the template by
        hand. Text of strangers goes through `chat`. A byte that a byte-level vocabulary has no token for is left out (SmolLM2
        has none for 21, control characters most of them). Raises `TokenizerError` for text that has no UTF-8 form (lone
        surrogates).
        """
        return self._encode(self._backend, text, whole=True)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids from the beginning of a text on; special tokens, and ids past the vocabulary, have none."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return text[1:] if self._strip and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, in UTF-8. Raises `TokenizerError` below 0."""
        if token < 0:
            raise TokenizerError(f"a token id must be at least 0, not {token}")
        return self._bytes[token] if token < len(self._bytes) else b""

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the model's template, ready for the answer.

        messages: {"role": ..., "content": ...} each. A special token spelled out in a message is text there, never the
        token: nobody can close a turn from inside it. Raises `ChatError` where there is no template, or it refuses.
        """
        if self._template is None:
            raise ChatError("this model has no chat template; /v1/completions takes a prompt as it is")
        if not self._spells_special(messages):
            return self._encode(self._backend, self._template.render(messages, add_generation_prompt=add_generation_prompt), whole=False)
        # Every letter of what is only spelled like a special token gets a mark behind it; those without are the template's.
        mark = self._unused(messages)
        marked = [{key: self._special_pattern.sub(lambda found: mark.join(found[0]) + mark, value) for key, value in message.items()}
                  for message in messages]
        ids: list[int] = []
        rendered = self._template.render(marked, add_generation_prompt=add_generation_prompt)
        for piece in re.split(f"({self._special_pattern.pattern})(?!{mark})", rendered):
            if piece in self._special:
                ids.append(self._special[piece])
            elif piece:
                ids += self._encode(self._plain, piece.replace(mark, ""), whole=False)
        return ids

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Any special token, longest first."""
        return re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))))

    @cached_property
    def _plain(self) -> Backend:
        """The same tokenizer, to which special tokens are text like any other."""
        plain = Backend.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _spells_special(self, messages: Sequence[Mapping[str, str]]) -> bool:
        return bool(self._special) and any(self._special_pattern.search(value) for message in messages for value in message.values())

    @staticmethod
    def _unused(messages: Sequence[Mapping[str, str]]) -> str:
        for mark in NONCHARACTERS:
            if not any(mark in value for message in messages for value in message.values()):
                return mark
        raise ChatError("these messages hold every noncharacter of Unicode from U+FDD0 to U+FDEF; one must be left out")

    @staticmethod
    def _encode(backend: Backend, text: str, *, whole: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise TokenizerError(f"the text has no UTF-8 form: {fault.reason} at character {fault.start}") from fault
        # As a batch of one: encode() keeps the interpreter's lock, and a text of megabytes would stop every thread for seconds.
        ids: list[int] = backend.encode_batch([text], add_special_tokens=whole)[0].ids
        return ids

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model directory. Raises `TokenizerError` naming the file.

        tokenizer.json is the tokenizer; the template is chat_template.jinja, or else in tokenizer_config.json.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{directory} has no tokenizer.json; other tokenizer files are not read")
        try:
            backend = Backend.from_file(str(path))
        except Exception as fault:  # the library raises Exception itself
            raise TokenizerError(f"{path} cannot be read: {fault}") from fault
        config = {**_object(directory / "special_tokens_map.json"), **_object(directory / "tokenizer_config.json")}
        return cls(backend, template=_template(directory, config), names=_names(config))


def _byte_table(backend: Backend, special: set[int], *, sentence_piece: bool) -> list[bytes]:
    """What each id adds to a text; nothing for special ones and for ids that the vocabulary leaves out."""
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    byte_of = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    fallback = re.compile(r"<0x([0-9A-Fa-f]{2})>")
    for token, key in vocab.items():
        if key in special:
            continue
        if sentence_piece:
            found = fallback.fullmatch(token)
            table[key] = bytes([int(found[1], 16)]) if found else token.replace("\u2581", " ").encode()
        else:  # a token that is not spelled in the alphabet was added as plain text
            table[key] = bytes(map(byte_of.__getitem__, token)) if all(map(byte_of.__contains__, token)) else token.encode()
    return table


def _is_sentence_piece(backend: Backend) -> bool:
    """Which of the two known decoders it is. Raises `TokenizerError` for a third."""
    decoder = json.loads(backend.to_str())["decoder"] or {"type": None}
    if decoder["type"] == "ByteLevel":
        return False
    parts = decoder.get("decoders", [])
    if decoder["type"] == "Sequence" and [part["type"] for part in parts] == SENTENCE_PIECE:
        replace, strip = parts[0], parts[3]
        if (replace["pattern"], replace["content"]) == ({"String": "\u2581"}, " ") and (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0):
            return True
    raise TokenizerError(f"decoder {decoder['type']!r} of the tokenizer is not supported; allowed: ByteLevel, or the sequence {', '.join(SENTENCE_PIECE)}")


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise TokenizerError(f"{path} is no JSON: {fault}") from fault
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold an object, not {type(value).__name__}")
    return value


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name; the one without a purpose of its own is called default
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}.get("default")
    if found is not None and not isinstance(found, str):
        raise TokenizerError(f"chat_template must be a string or a list with one named default, not {type(found).__name__}")
    return found


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: strings, or objects with the string as content."""
    plain: dict[str, str] = {}
    for name in NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            plain[name] = text
        elif value is not None:
            raise TokenizerError(f"{name} must be a string or an object with content, not {value!r}")
    return plain
