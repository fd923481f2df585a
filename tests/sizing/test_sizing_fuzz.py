"""Configs that are broken at random: each is read, or refused by `ConfigError` in one line, and never anything else."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from kvsched.errors import ConfigError
from kvsched.sizing.costs import Widths
from kvsched.sizing.deployment import Deployment
from kvsched.sizing.dtypes import dtype
from kvsched.sizing.reading import read_model
from kvsched.sizing.sized import layer_report, size

CONFIGS = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((Path(__file__).parent / "configs").glob("*.json"))]
ODD: tuple[Any, ...] = (
    None, 0, -1, 1, 3, 7, 2**40, 1.5, float("nan"), True, "auto", "", "32", [], [0], ["full_attention"], [None], {}, {"model_type": 3}, {"a": []},
)
ROUNDS = 3000


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be changed: keys of objects, however deep."""
    if not isinstance(value, dict):
        return []
    return [one for key in value for one in ((*path, key), *places(value[key], (*path, key)))]


def broken(rng: random.Random) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(rng.choice(CONFIGS))
    for _ in range(rng.randint(1, 3)):
        *way, last = rng.choice(places(config))
        inner: Any = config
        for key in way:
            inner = inner[key]
        if rng.random() < 0.3:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(rng.choice(ODD))
    return config


def test_broken_configs_are_read_or_refused_in_one_line() -> None:
    refused: list[str] = []
    rng = random.Random(3)
    for _ in range(ROUNDS):
        config = broken(rng)
        tp, pp = rng.choice([1, 1, 2, 3, 8, 64]), rng.choice([1, 1, 2, 5])
        widths = Widths(kv=dtype("fp8"), state=dtype("bf16"), conv=dtype("bf16"))
        try:
            model = read_model(config)
            layer_report(model, Deployment(widths=widths, tp=tp, pp=pp, kv_bytes=(0,) * pp, cross_tokens=rng.choice([None, 10])))
            size(model, Deployment(widths=widths, tp=tp, pp=pp, kv_bytes=(rng.choice([0, 10**9, 10**13]),) * pp, cross_tokens=10))
        except ConfigError as error:
            refused.append(str(error))
    assert not [line for line in refused if "\n" in line]
    assert len(refused) > ROUNDS // 4
