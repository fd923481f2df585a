"""How long and how many, by cases C03, C64, C65, C67 to C70, C72 and C87."""

from __future__ import annotations

import pytest

from kvsched.errors import ConfigError
from kvsched.sizing.capacity import (
    Resource,
    SharedBlocks,
    attended_requests,
    concurrency,
    fits,
    longest_output,
    max_servable_tokens,
    running_on,
    state_slots_for,
)
from kvsched.sizing.windows import least_window_pages, window_chunk, window_peak, window_pool


def test_c03_sizing_accepts_what_submit_accepts() -> None:
    pages, page = 64_384 // 64, 64
    assert pages == 1006
    assert fits(61_200, 3000, pages, page)
    assert not fits(61_200, 6800, pages, page)
    assert longest_output(61_200, pages, page) == 3185
    assert fits(61_200, 3185, pages, page)
    assert not fits(61_200, 3186, pages, page)


def test_c08_the_last_token_needs_no_slot() -> None:
    assert max_servable_tokens(256, 16, 4096) == 4095
    assert fits(4080, 16, 256, 16, 4096)
    assert not fits(4081, 16, 256, 16, 4096)
    assert fits(4096, 1, 256, 16, None)
    assert not fits(4096, 2, 256, 16, None)


def test_c64_constant_groups_cost_blocks_and_do_not_divide_the_pool() -> None:
    shared = SharedBlocks(1000, 16, growing=1, constant=3)
    assert shared.per_request(1600) == 103
    assert shared.requests(1600) == 9, "10 by the formula that forgets the constant groups"
    assert shared.max_servable_tokens() == 997 * 16, "not a quarter of it"


def test_c65_a_tiny_prompt_takes_a_block_of_every_group() -> None:
    shared = SharedBlocks(60, 7808, growing=23)
    assert [shared.requests(slots) for slots in (1, 12, 7808)] == [2, 2, 2]
    assert shared.per_request(12) == 23
    assert shared.requests(7809) == 1
    warning = shared.warning()
    assert warning is not None
    assert "at least 23 of 60 blocks, so no more than 2 run at once" in warning
    assert SharedBlocks(60, 16).warning() is None


def test_c68_a_workspace_that_grows_with_context() -> None:
    assert attended_requests([4100, 4100, 4100], 8192) == 1
    assert attended_requests([4096, 4096, 1], 8192) == 2
    assert attended_requests([100], 8192) == 1
    assert attended_requests([9000], 8192) == 0


def test_c69_a_window_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="a window pool of 409 tokens has 1 pages of 256, 256 tokens, and a window of 128 needs 512"):
        window_pool(int(4096 * 0.1), 256, 128)
    assert window_pool(512, 256, 128) == 2
    assert least_window_pages(256, 256) == 2
    assert least_window_pages(257, 256) == 3


def test_c70_the_chunk_is_what_the_window_pool_can_stage() -> None:
    pages = window_pool(20_992, 256, 128)
    assert window_chunk(pages, 256, 128, 32_768) == 20_480
    assert -(-20_742 // 20_480) == 2, "two chunks"
    assert window_chunk(pages, 256, 128, 16_333) == 16_333
    with pytest.raises(ConfigError, match="stages no page of a prompt beside a window of 128"):
        window_chunk(2, 256, 128, 32_768)


def test_c72_the_peak_between_two_recycling_points() -> None:
    assert window_peak(64, 16, 64) == 160
    pool = Resource("window_pages", 480 // 16, page_size=16, most=160)
    assert pool.requests(10_000) == 3
    assert pool.requests(80) == 6


def test_c87_a_hint_is_no_limit() -> None:
    """Trained for a million tokens, a live pool of about 350,000: a prompt of 33,611 is accepted; only an explicit cap clips."""
    pages = 350_000 // 16
    assert fits(33_611, 1, pages, 16, 1_000_000)
    assert max_servable_tokens(pages, 16, 1_000_000) == pages * 16
    assert not fits(33_611, 1, pages, 16, 32_768)
    assert SharedBlocks(pages, 16, constant=10).max_servable_tokens(1_000_000) == (pages - 10) * 16


def test_the_minimum_over_all_pools_and_its_name() -> None:
    pools = [
        Resource("pages", 1000, page_size=16), Resource("state_slots", 12, fixed=1), Resource("window_pages", 40, page_size=16, most=64),
        Resource("max_running", 64, fixed=1),
    ]
    assert (concurrency(16, pools).requests, concurrency(16, pools).binding) == (12, "state_slots")
    assert (concurrency(64, pools).requests, concurrency(64, pools).binding) == (10, "window_pages")
    assert (concurrency(16_000, pools).requests, concurrency(16_000, pools).binding) == (1, "pages")
    assert concurrency(16_001, pools).requests == 0
    with pytest.raises(ConfigError, match="concurrency needs a pool"):
        concurrency(1, [])


def test_state_slots_bound_how_many_run() -> None:
    assert running_on(13, 3, 1) == 4
    assert state_slots_for(4, 3, 1) == 13
    assert running_on(1, 1, 2) == 0
    for running in range(1, 20):
        for each in (1, 2, 3):
            assert running_on(state_slots_for(running, each, 2), each, 2) == running
