"""The token log against a list per row."""

from __future__ import annotations

import random

import numpy as np

from kvsched.tokenlog import KEEP, TICKS, TokenLog


def test_random_lines_against_lists() -> None:
    """Rows come and go, the log gets wider, old blocks are folded: every reader sees its own tokens, in order."""
    rng = random.Random(3)
    log, rows = TokenLog(3), 3
    since, said = dict.fromkeys(range(3), 0), {row: list[int]() for row in range(3)}
    for line in range(5 * TICKS):
        if line % 97 == 50:
            rows *= 2
            log.widen(rows)
            for row in range(rows // 2, rows):
                since[row], said[row] = log.tick, []
        chosen = sorted(rng.sample(range(rows), rng.randint(0, rows)))
        tokens = [rng.randint(0, 9) for _ in chosen]
        log.write(np.array(chosen, dtype=np.int64), np.array(tokens, dtype=np.int64))
        for row, token in zip(chosen, tokens, strict=True):
            said[row].append(token)
        row = rng.randrange(rows)
        assert log.read(row, since[row]).tolist() == said[row]
        if rng.random() < 0.2:
            since[row], said[row] = log.tick, []
            assert log.read(row, since[row]).tolist() == []


def test_a_slice_writes_like_rows() -> None:
    log = TokenLog(4)
    log.write(slice(0, 2), np.array([5, 6]))
    log.write(np.array([1]), np.array([7]))
    assert [log.read(row, 0).tolist() for row in range(3)] == [[5], [6, 7], []]


def test_folding_keeps_what_readers_have_not_read() -> None:
    log = TokenLog(1)
    folded: list[int] = []
    since = 0
    count = (KEEP + 3) * TICKS
    for line in range(count):
        log.write(np.array([0]), np.array([line]))
        while log.full:
            folded += log.read_oldest(0, since).tolist()
            since = log.oldest_end
            log.fold()
    assert folded
    assert folded + log.read(0, since).tolist() == list(range(count))


def test_a_wider_log_ends_its_block_early() -> None:
    log = TokenLog(2)
    log.write(np.array([0, 1]), np.array([1, 2]))
    log.widen(2)
    assert log.tick == 1
    log.widen(4)
    assert log.tick == TICKS
    log.write(np.array([3]), np.array([9]))
    assert (log.read(0, 0).tolist(), log.read(3, TICKS).tolist(), log.tick) == ([1], [9], TICKS + 1)
