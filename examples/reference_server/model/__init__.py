"""The language model: its config, its forward pass, and what fills it with weights. No scheduling and no text lives here."""

from __future__ import annotations

from reference_server.model.config import ModelConfig, ModelError, Rope
from reference_server.model.llama import Llama
from reference_server.model.tiny import tiny, tiny_tokenizer

__all__ = ["Llama", "ModelConfig", "ModelError", "Rope", "tiny", "tiny_tokenizer"]
