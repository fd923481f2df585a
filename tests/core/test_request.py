"""What a request may say, and the table of its life."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvsched import Namespace, Request
from kvsched.errors import InternalError, InvalidRequest
from kvsched.request import LIFECYCLE, Cause, State, advance, as_tokens, whole

LEGAL = {
    "waiting": {"admit": "running", "finish": "finished", "abort": "aborted"},
    "running": {"undo_admit": "waiting", "retract": "waiting", "hold": "paused", "finish": "finished", "abort": "aborted"},
    "paused": {"undo_admit": "waiting", "retract": "waiting", "resume": "running", "finish": "finished", "abort": "aborted"},
    "finished": {}, "aborted": {},
}


@pytest.mark.parametrize(("state", "cause"), list(itertools.product(State, Cause)), ids=lambda value: value.value)
def test_each_transition_is_in_the_table_or_raises(state: State, cause: Cause) -> None:
    after = LEGAL[state.value].get(cause.value)
    if after is None:
        with pytest.raises(InternalError, match=f"no transition '{cause.value}' from state '{state.value}'"):
            advance(state, cause)
    else:
        assert advance(state, cause) is State(after)


def test_the_table_has_nothing_else() -> None:
    assert len(LIFECYCLE) == sum(map(len, LEGAL.values()))


@pytest.mark.parametrize(("field", "value"), [
    ("id", ""), ("id", 3), ("prompt", []), ("prompt", [[1]]), ("prompt", [1.5]), ("prompt", "text"), ("prompt", [-1]), ("prompt", [2**31]),
    ("prompt", None), ("max_new_tokens", -1), ("max_new_tokens", 1.5), ("max_new_tokens", True), ("min_new_tokens", -1),
    ("min_new_tokens", None), ("stop_token_ids", 3), ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", ["a"]),
    ("ignore_eos", 1), ("priority", 0.5), ("priority", None), ("tenant", None), ("tenant", 1), ("namespace", "x"), ("adapter", 3),
    ("n", 0), ("n", True), ("cache_read", None), ("cache_write", 0), ("ready", "yes"), ("block_tokens", 0), ("block_tokens", 2.0),
    ("pin", -1), ("pin", None),
])
def test_a_malformed_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=field):
        Request(**{"id": "R", "prompt": [1], field: value})


def test_namespace_and_adapter_must_not_disagree() -> None:
    with pytest.raises(InvalidRequest, match=r"namespace\.adapter is 'a' but adapter is 'b'"):
        Request("R", [1], adapter="b", namespace=Namespace(adapter="a"))
    with pytest.raises(InvalidRequest, match="state one of them"):
        Request("R", [1], namespace=Namespace(adapter="a"))


def test_the_space_has_the_adapter_in_it() -> None:
    assert Request("R", [1]).space == Namespace()
    assert Request("R", [1], adapter="a", namespace=Namespace(salt="s")).space == Namespace("a", None, "s")
    assert Request("R", [1], adapter="a", namespace=Namespace("a", "2")).space == Namespace("a", "2", None)
    assert Namespace("ab", None) != Namespace("a", "b")


def test_tokens_are_a_read_only_copy() -> None:
    given = np.arange(5)
    tokens = Request("R", given).tokens
    given[0] = 99
    assert tokens.tolist() == [0, 1, 2, 3, 4]
    assert tokens.dtype == np.int32
    assert not tokens.flags.writeable
    assert as_tokens(np.array([3], dtype=np.uint8)).tolist() == [3]
    assert as_tokens(range(2)).tolist() == [0, 1]
    assert as_tokens([2**31 - 1]).tolist() == [2**31 - 1]


def test_whole_takes_integers_only() -> None:
    assert whole(np.int64(3), "x", 0) == 3
    assert whole(None, "x", 0, none=True) is None
    assert whole(-5, "x", None) == -5
    for value in (None, 1.0, "1", True, np.bool_(True), -1, np.float64(2)):
        with pytest.raises(InvalidRequest, match="x must be an integer of at least 0"):
            whole(value, "x", 0)


def test_stop_tokens_may_be_any_collection() -> None:
    assert Request("R", [1], stop_token_ids=np.array([2, 3])).stop_token_ids == {2, 3}
