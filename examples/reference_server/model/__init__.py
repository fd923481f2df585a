"""The language model: its config, its forward pass, and what fills it with weights. No scheduling lives here."""

from __future__ import annotations

from reference_server.model.config import ModelConfig, ModelError, Rope
from reference_server.model.gguf import default_model_path
from reference_server.model.llama import Llama
from reference_server.model.loading import Loaded, load
from reference_server.model.tiny import tiny, tiny_tokenizer

__all__ = ["Llama", "Loaded", "ModelConfig", "ModelError", "Rope", "default_model_path", "load", "tiny", "tiny_tokenizer"]
