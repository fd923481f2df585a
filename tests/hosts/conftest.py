"""Tests of the adapters to other servers. `make test-hosts` sets up an environment that has them; elsewhere they skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, so that a test can look at its scheduler
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# One thread, bound to no core: two that wait for each other are ten times slower where something else runs beside them.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made once."""
    from rig import make_model

    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the adapter from outside."""
    for name in [name for name in os.environ if name.startswith("KVSCHED_VLLM_")]:
        monkeypatch.delenv(name)
