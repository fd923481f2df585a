"""The same calls give the same decisions: on several schedulers, in several processes, whatever the hash seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from random import Random

import pytest

from kvsched.testing.driver import Call, Setup, one_run, play, random_call, random_setup
from kvsched.testing.host import CheckedHost


def recorded(seed: int, calls: int = 80) -> tuple[Setup, list[Call], list[str]]:
    """A random run, written down, and the digests of its plans."""
    rng = Random(seed)
    setup = random_setup(rng)
    out: list[Call] = []
    texts: list[list[int]] = []
    host = CheckedHost(**setup)
    for _ in range(calls):
        name, arguments = random_call(rng, host, texts)
        out.append((name, arguments))
        getattr(host, name)(**arguments)
    host.drain()
    return setup, out, host.digests


def seal(seeds: range) -> str:
    """One digest over all plans of these runs."""
    return hashlib.blake2b("".join(d for seed in seeds for d in one_run(seed, 50).digests).encode(), digest_size=16).hexdigest()


@pytest.mark.parametrize("seed", range(500, 512))
def test_several_schedulers_agree(seed: int) -> None:
    setup, calls, digests = recorded(seed)
    assert digests
    for _ in range(3):
        assert play(setup, calls).digests == digests


def test_hash_seeds_do_not_matter() -> None:
    program = "import sys; sys.path.insert(0, 'tests'); import test_determinism; print(test_determinism.seal(range(700, 712)))"
    answers = set()
    for hash_seed in ("0", "1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        answers.add(run.stdout.strip())
    assert answers == {seal(range(700, 712))}


def test_the_digest_tells_decisions_apart() -> None:
    seals = {tuple(one_run(seed, 50).digests) for seed in range(700, 712)}
    assert len(seals) == 12
