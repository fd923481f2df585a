"""Text and token ids: tokenizers, chat templates, and text that comes token by token. No model lives here."""

from __future__ import annotations

from reference_server.text.chat import ChatError, ChatTemplate
from reference_server.text.stream import TextStream
from reference_server.text.tokenizer import Tokenizer, TokenizerError

__all__ = ["ChatError", "ChatTemplate", "TextStream", "Tokenizer", "TokenizerError"]
