"""For each law a one-line change that breaks it, the test that turns red, and what is then seen.

`make soak` makes each change in a copy of the package and runs the test (`test_laws_can_fail`). docs/laws.md shows the list;
`python tests/laws/mutants.py` writes it there anew.
"""

from __future__ import annotations

from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "laws.md"
BEGIN, END = "<!-- the table: tests/laws/mutants.py -->\n", "<!-- end of the table -->\n"


@attrs.frozen
class Mutant:
    """law: whose. where: file under src/kvsched and the symbol that is changed. old, new: text, `old` being there once.

    test: file under tests/laws and name of the test. seen: what the broken scheduler does.
    """

    law: str
    where: str
    old: str
    new: str
    test: str
    seen: str

    @property
    def path(self) -> str:
        return self.where.split(":")[0]


MUTANTS = (
    # A
    Mutant("A1", "core.py:Core.leave", "self.quarantined += private", "pass",
           "test_a_accounting.py:test_a1_every_page_is_in_exactly_one_term", "an aborted page in flight is in no term"),
    Mutant("A1", "decode.py:pages_due", "pages_for_each(ends, core.config.page_size)", "-(-ends // core.config.page_size)",
           "test_a_accounting.py:test_a1_tokens_become_pages_in_one_place", "tokens become pages in a second place"),
    Mutant("A2", "units.py:total_slots", "prompt + max(max_new, 1) - 1", "prompt + max_new",
           "test_a_accounting.py:test_a2_the_pool_limit_is_one_slot_less", "(4096, 1) is refused by a pool of 4,096"),
    Mutant("A2", "decode.py:_widths", "np.minimum(most, residents.total[rows] - residents.ctx[rows])", "most",
           "test_a_accounting.py:test_a2_speculative_slots_end_at_the_last_slot", "slots beyond the last are planned, in a pool that has none"),
    Mutant("A3", "memory/page_pool.py:PagePool._taken_back_one_by_one", " or marks[page] < 0", "",
           "test_a_accounting.py:test_a3_a_double_free_raises_and_changes_nothing", "the second release is taken"),
    Mutant("A3", "core.py:Core.store_prefix", "self.residents.table[live.row, start // size : stop // size] = kept", "pass",
           "test_a_accounting.py:test_a3_two_that_computed_one_prefix_share_the_copy_in_the_tree", "a row names pages that are not its own"),
    Mutant("A3", "commit.py:_commit_chunk", "core.config.exchange_pages and not", "not",
           "test_sharing.py:test_a3_pages_computed_twice_are_exchanged_or_given_back_at_the_end", "a row that is only appended to is rewritten"),
    Mutant("A4", "newcomers.py:shares", "other.family is live.family", "False",
           "test_a_accounting.py:test_a4_full_pages_of_the_prompt_are_computed_once", "each child computes all of the prompt"),
    Mutant("A4", "admission/intake.py:refusal", "request.n, len(core.queue.fresh)", "1, len(core.queue.fresh)",
           "test_a_accounting.py:test_a4_refused_by_the_need_of_one_and_entering_whole", "four children enter a queue for three"),
    # B
    Mutant("B1", "verdict.py:decide", "fundable: int, ceiling: int)", "fundable: int, ceiling: int, chunk_tokens: int = 0)",
           "test_b_need_and_funds.py:test_b1_no_decision_knows_of_a_chunk", "a decision takes a chunk size"),
    Mutant("B1", "newcomers.py:Admission._try", "wanted = pages_wanted(core, live)", "wanted = min(pages_wanted(core, live), 32)",
           "test_b_need_and_funds.py:test_b1_a_request_is_charged_its_length_and_not_its_chunk", "B, of 20,480 pages, starts beside A"),
    Mutant("B2", "verdict.py:decide", "if need > ceiling:", "if need > 0.9 * ceiling:",
           "test_b_need_and_funds.py:test_b2_no_share_of_the_pool_is_kept_back", "99 % of a large pool is refused"),
    Mutant("B2", "admission/intake.py:refusal", "decide(need, need, core.ceiling())", "decide(need, need, core.ceiling() + 1)",
           "test_b_need_and_funds.py:test_b2_the_band_between_ceiling_and_capacity_is_refused", "what the null page would be needed for is accepted, and waits for ever"),
    Mutant("B2", "core.py:Core.ceiling", "self.pool.usable - self.reserve", "self.pool.usable",
           "test_b_need_and_funds.py:test_b2_pins_lower_the_ceiling", "a request that needs pinned pages is accepted"),
    Mutant("B3", "admission/budget.py:reaches", "np.minimum(np.ceil(core.ratio.value * rest).astype(np.int64), config.clip_new_tokens)",
           "np.ceil(core.ratio.value * rest).astype(np.int64)",
           "test_b_need_and_funds.py:test_b3_the_estimate_is_clipped", "residents reserve 0.7 of 200,000 tokens"),
    Mutant("B3", "admission/budget.py:reaches", "base = np.maximum(residents.ctx[rows], residents.target[rows])\n    rest", "base = residents.ctx[rows]\n    rest",
           "test_b_need_and_funds.py:test_b3_the_base_is_what_is_computed_or_to_be_computed", "prefill that is not computed yet is not reserved for"),
    Mutant("B3", "newcomers.py:Admission._try", "need = wanted - matched // size", "need = wanted",
           "test_b_need_and_funds.py:test_b3_the_match_is_taken_off", "a hit is paid for a second time"),
    Mutant("B3", "units.py:pages_for_each", 'as a new array."""\n    return -(-tokens // page_size)', 'as a new array."""\n    return tokens // page_size',
           "test_b_need_and_funds.py:test_b3_sums_are_of_pages", "the part of a page that a resident still needs is promised to nobody"),
    Mutant("B4", "chunks.py:continue_chunk", "room = core.available()", "room = core.available() - core.ledger.outstanding // config.page_size",
           "test_b_need_and_funds.py:test_b4_a_request_as_large_as_the_pool_completes_alone", "a continuation waits for its own promise"),
    Mutant("B4", "admission/budget.py:Funds.fundable", "self.core.available() - self.promised", "self.core.available()",
           "test_b_need_and_funds.py:test_b4_promises_to_others_are_taken_off", "B starts on what A was promised"),
    Mutant("B4", "newcomers.py:Admission._try", "verdict = decide(need, self.funds.fundable(),", "verdict = decide(need, self.funds.fundable() + matched // size,",
           "test_b_need_and_funds.py:test_b4_the_match_is_locked_when_funds_are_read", "what C matched counts as what can be evicted for C"),
    Mutant("B4", "newcomers.py:Admission._let_go", "elif handle is not None and core.cache is not None:", "elif False:",
           "test_b_need_and_funds.py:test_b4_who_is_not_admitted_leaves_no_lock", "a deferred candidate keeps pages locked"),
    Mutant("B4", "newcomers.py:Admission._try", "by_peak = self.funds.peak_fits(live, handle.pages if handle is not None else NO_PAGES)", "by_peak = False",
           "test_b_need_and_funds.py:test_b4_known_lengths_are_reserved_by_their_peak", "the sum of 45 is asked of a pool of 40"),
    Mutant("B4", "decode.py:_plan_rows", "ends = np.where(blocks, starts, ends)", "pass",
           "test_b_need_and_funds.py:test_b4_a_block_is_charged_when_it_opens_and_moves_when_it_is_final", "a block counts as computed before it is final"),
    Mutant("B5", "memory/radix.py:RadixCache.evict", "if excess > 0:", "if excess > len(node.pages):",
           "test_b_need_and_funds.py:test_b5_evict_delivers_what_evictable_says_and_takes_tails", "a leaf goes whole"),
    Mutant("B6", "admission/budget.py:needs", "if not core.ledger.enforced:", "if True:",
           "test_b_ledger_and_bounds.py:test_b6_committed_prefill_is_not_free", "the next step sees 100,000 and admits B"),
    Mutant("B6", "admission/ledger.py:CommitmentLedger.commit", "if key in self._open or tokens < 0:", "if tokens < 0:",
           "test_b_ledger_and_bounds.py:test_b6_double_commit_and_overspend_are_refused", "a second commit replaces the first"),
    Mutant("B6", "admission/ledger.py:CommitmentLedger.unspend", "self._open[key] += tokens", "self._open[key] += tokens; self.chunks -= 1",
           "test_b_ledger_and_bounds.py:test_b6_the_count_of_chunks_only_rises", "the count goes back with a rolled-back step"),
    Mutant("B7", "admission/budget.py:needs", "if not core.ledger.enforced:", "if True:",
           "test_b_ledger_and_bounds.py:test_b7_with_the_ledger_they_take_turns", "two requests that fit alone block each other"),
    Mutant("B7", "admission/budget.py:needs", "if not core.ledger.enforced:", "if False:",
           "test_b_ledger_and_bounds.py:test_b7_without_the_ledger_two_requests_deadlock", "the deadlock cannot be shown any more"),
    Mutant("B8", "explain.py:status_of", "if not core.lives:", "if not core.running:",
           "test_b_heads.py:test_b8_a_deferred_head_is_pending_work", "a deferred head looks like idleness"),
    Mutant("B9", "newcomers.py:Admission._try", "if core.residents.count >= config.max_running:", "if len(step.planned) + len(step.decode_rows) >= config.max_running:",
           "test_b_heads.py:test_b9_a_resident_in_no_batch_keeps_its_place", "a resident between two chunks gives its place away"),
    Mutant("B10", "admission/budget.py:first_fit", "return int(room[fits[0]]) - need if len(fits)", "return int(room[fits[0]]) if len(fits)",
           "test_b_heads.py:test_b10_backfill_passes_the_head_only_where_its_start_is_not_delayed", "C6 passes too, and B is late"),
    Mutant("B10", "newcomers.py:Admission.run", "elif reason in HEAD_REASONS and self.head is None:", "elif False:",
           "test_b_heads.py:test_b10_strict_lets_nobody_pass", "a deferred head is passed by all who fit"),
    Mutant("B10", "newcomers.py:Admission._behind_head_closed", "return head.bypassed >= core.config.max_bypass", "return False",
           "test_b_heads.py:test_b10_skip_is_bounded_by_a_count", "more than three pass"),
    Mutant("B10", "newcomers.py:Admission.run", "self.barrier = self.barrier or (waits_for_adapter and reason is not None)", "pass",
           "test_b_heads.py:test_b10_the_adapter_limit_steps_over_once", "A3 overtakes B in a second pass"),
    Mutant("B10", "newcomers.py:Admission._try", "if adapter is not None and self._takes_the_heads_adapter_place(adapter):", "if False:",
           "test_b_heads.py:test_b10_backfill_keeps_the_adapter_place_of_the_head", "A takes the one adapter place, and B's start is delayed"),
    Mutant("B10", "newcomers.py:Admission._try", "if not live.ready or live.late:", "if live.late:",
           "test_b_heads.py:test_b10_who_is_not_ready_is_stepped_over", "a request that is not ready starts"),
    Mutant("B11", "admission/intake.py:refusal", "config.max_queued_tokens, request.n * prompt,", "config.max_queued_tokens, prompt,",
           "test_b_ledger_and_bounds.py:test_b11_n_counts_with_its_prompt_n_times", "three samples count as one"),
    Mutant("B11", "newcomers.py:Admission._admit", "counted = live.prompt - min(matched, live.prompt)", "counted = live.prompt",
           "test_b_ledger_and_bounds.py:test_b11_the_prompt_count_in_flight_falls_with_computed_tokens_and_hits", "hits are charged until the commit"),
    Mutant("B11", "admission/intake.py:refusal", "request.n, len(core.queue.fresh)", "request.n, len(core.queue)",
           "test_b_ledger_and_bounds.py:test_b11_a_retracted_request_is_charged_nothing_again", "a retracted request takes a place in the queue"),
    # C
    Mutant("C1", "admission/ratio.py:TokenRatio.decay", "value if value > self.minimum else self.minimum", "value",
           "test_c_retraction.py:test_c1_start_minimum_and_decay", "step 601 goes below the minimum"),
    Mutant("C1", "admission/ratio.py:TokenRatio.__init__", "min(INITIAL * conservativeness, 1.0)", "INITIAL * conservativeness",
           "test_c_retraction.py:test_c1_start_minimum_and_decay", "conservativeness 2 starts at 1.4"),
    Mutant("C1", "admission/ratio.py:TokenRatio.retracted", "generated + GRACE_TOKENS * survivors", "generated",
           "test_c_retraction.py:test_c1_after_a_retraction_it_is_made_of_the_survivors", "no grace for the survivors"),
    Mutant("C1", "planning.py:_phases", "core.ratio.decay()", "pass",
           "test_c_retraction.py:test_c1_it_decays_with_decode_steps_and_is_reset_when_idle", "the estimate stands still"),
    Mutant("C2", "retraction.py:victims", "key=lambda live: (-live.priority, lost_tokens(core, live), -live.arrival)",
           "key=lambda live: (lost_tokens(core, live), -live.priority, -live.arrival)",
           "test_c_retraction.py:test_c2_who_is_retracted", "a better priority goes before a worse one"),
    Mutant("C2", "retraction.py:victims", "key=lambda live: (-live.priority, lost_tokens(core, live), -live.arrival)",
           "key=lambda live: (-live.priority, -live.arrival)",
           "test_c_retraction.py:test_c2_who_is_retracted", "the newest goes, whatever it loses"),
    Mutant("C2", "retraction.py:victims", "if live is not spared and live.row not in planned", "if live.row not in planned",
           "test_c_retraction.py:test_c2_who_is_retracted", "the oldest is retracted"),
    Mutant("C2", "retraction.py:lost_tokens", "return computed - max(kept", "return computed or max(kept",
           "test_c_retraction.py:test_c2_what_stays_in_the_tree_is_not_lost", "what the tree keeps counts as lost, and C goes"),
    Mutant("C2", "retraction.py:make_room", "wanted -= demand.pop(row, 0)", "demand.pop(row, 0)",
           "test_c_retraction.py:test_c2_demand_is_read_again_after_each_victim", "a second victim for a page that the first one wanted"),
    Mutant("C2", "retraction.py:make_room", "while wanted > core.available() + on_their_way:", "while wanted > core.available():",
           "test_c_retraction.py:test_c2_pages_on_their_way_count", "three victims for pages that are on their way"),
    Mutant("C2", "retraction.py:retract", "record.late[row] = live", "pass",
           "test_c_retraction.py:test_c2_the_late_token_is_delivered_once_and_joins_the_resume", "the token in flight is dropped"),
    Mutant("C2", "queue.py:WaitingQueue.candidates", "yield from tuple(self.resuming)\n            yield from arrange(self.fresh.values())",
           "yield from arrange(self.fresh.values())\n            yield from tuple(self.resuming)",
           "test_c_retraction.py:test_c2_a_retracted_request_resumes_first_under_every_order", "B starts before A resumes"),
    Mutant("C2", "admission/budget.py:pages_wanted", "return min(pages + 1, live.total_pages) if live.retractions else pages", "return pages",
           "test_c_retraction.py:test_c2_readmitted_when_need_and_a_page_of_growth_fit", "V comes back with no page to grow"),
    Mutant("C2", "newcomers.py:Admission._try", "if step.retracted_for_memory or live.id in step.retracted:", "if False:",
           "test_c_retraction.py:test_c2_a_step_that_retracted_admits_nobody", "D starts in the step that retracted C"),
    Mutant("C2", "retraction.py:retract", "core.leave(live, donate=True, valid=valid)", "core.leave(live, donate=False, valid=valid)",
           "test_c_retraction.py:test_c2_what_a_victim_computed_stays_in_the_tree", "all of it is computed again"),
    Mutant("C3", "retraction.py:make_room", "candidates = victims(core, step)", "candidates = []",
           "test_c_retraction.py:test_c3_some_request_can_always_run_to_its_end", "everybody waits for a page, and nobody gives one"),
    Mutant("C3", "chunks.py:continue_chunk", "and not safe(core, {row: pages}):", "and False:",
           "test_c_retraction.py:test_c3_two_known_lengths_whose_prompts_are_chunked", "two known lengths block each other"),
    Mutant("C3", "retraction.py:make_room", "if guaranteed and not safe(core, {**granted, row: pages}):", "if False:",
           "test_c_retraction.py:test_c3_a_decode_does_not_take_the_page_that_lets_another_end", "B takes the last slot, and neither can end"),
    Mutant("C4", "planning.py:_phases", "if first:", "if True:",
           "test_c_step_budget.py:test_c4_decodes_then_partial_prefills_then_new_requests", "prefill takes what decodes need"),
    Mutant("C4", "chunks.py:continue_chunk", "length = chunk_length(live.target - start, step.prefill_budget,",
           "length = chunk_length(live.target - start, 8 * (step.prefill_budget // 8),",
           "test_c_step_budget.py:test_c4_a_chunk_is_not_rounded_to_pages", "a chunk is rounded down"),
    Mutant("C4", "decode.py:_plan_rows", "residents.served[rows] = step.number", "pass",
           "test_c_step_budget.py:test_c4_decodes_take_turns", "the first ones are served in every step, and no gap ends"),
    Mutant("C4", "decode.py:prefill_first", "step.number - step.core.last_decode_step < every", "step.number - step.core.last_decode_step <= every",
           "test_c_step_budget.py:test_c4_decode_every_bounds_the_gap", "the decode is a step late"),
    Mutant("C4", "planning.py:_phases", "bool(decoding) and _grant(step)", "False",
           "test_c_step_budget.py:test_c4_a_grant_bounds_the_wait_of_a_prefill", "no chunk in 200 steps"),
    Mutant("C4", "planning.py:_grant", "every is None or core.postponed", "every is None",
           "test_c_step_budget.py:test_c4_after_a_grant_that_put_decodes_off_decodes_go_first", "grants in every step, and no decode"),
    Mutant("C4", "newcomers.py:Admission._stepped_over", "if length < rest:", "if length <= rest:",
           "test_c_step_budget.py:test_c4_a_prefill_that_would_end_needs_no_place", "C waits for a place that it does not need"),
    Mutant("C4", "newcomers.py:Admission._try", "(cut and config.max_partial_prefills == 0)", "False",
           "test_c_step_budget.py:test_c4_whole_prefills_wait_for_a_step_that_holds_them", "a prefill that must be whole is cut"),
    Mutant("C4", "newcomers.py:Admission.run", "elif reason is WaitReason.STEP_TOKENS:", "elif False:",
           "test_c_step_budget.py:test_c4_whole_prefills_wait_for_a_step_that_holds_them", "short prompts pass a long one for ever"),
    # D
    Mutant("D1", "memory/radix.py:RadixCache.match", "return 0 if root is None else self._walk(root, self._view(tokens))[2] // WIDTH",
           "return 0 if root is None else [handle := self.lock(namespace, tokens), self.unlock(handle), handle.length][2]",
           "test_d_cache.py:test_d1_a_match_changes_nothing", "a look splits a node and counts as a use"),
    Mutant("D1", "newcomers.py:lock", "return handle, handle.length", "cache.unlock(handle); return cache.lock(live.space, live.tokens[:0]), handle.length",
           "test_d_cache.py:test_d1_match_and_lock_are_one", "a matched page belongs to nobody"),
    Mutant("D1", "memory/radix.py:RadixCache._split", "upper.locks = 1 if node.locks else 0", "upper.locks = 0",
           "test_d_cache.py:test_d1_unlock_goes_by_what_was_recorded", "the upper half of a split node was never locked"),
    Mutant("D2", "units.py:reusable", "aligned(prompt - 1, page_size)", "aligned(prompt, page_size)",
           "test_d_cache.py:test_d2_a_fully_cached_prompt_computes_something", "a chunk of no tokens"),
    Mutant("D3", "request.py:Request.space", "return attrs.evolve(self.namespace, adapter=self.adapter)", "return self.namespace",
           "test_d_cache.py:test_d3_the_adapter_is_part_of_the_namespace_said_or_not", "one adapter reads the pages of another"),
    Mutant("D4", "commit.py:_commit_chunk", "aligned(min(end_at, live.target), core.config.page_size)", "aligned(live.target, core.config.page_size)",
           "test_d_cache.py:test_d4_the_protected_length_follows_what_is_committed", "16,384 are protected when 8,192 are computed"),
    Mutant("D5", "core.py:Core.take", "short = n - self.pool.free", "short = n",
           "test_d_cache.py:test_d5_eviction_asks_for_the_shortfall_in_pages", "all 47 pages are evicted where 7 are short"),
    Mutant("D5", "memory/radix.py:RadixCache.evict", "wanted = min(count(n), self._evictable) * WIDTH",
           "wanted = min(count(n), len(self.cached_pages()) - self._locked) * WIDTH",
           "test_d_cache.py:test_d5_the_cost_of_an_eviction_does_not_grow_with_the_tree", "every eviction walks the tree"),
    Mutant("D7", "core.py:Core.pin", "room = min(limit - self.reserve, self.ceiling() - largest)", "room = limit - self.reserve",
           "test_d_cache.py:test_d7_a_pin_is_cut_short_for_an_accepted_request", "R was accepted and can never fit"),
    Mutant("D7", "core.py:Core.pin", "room -= page not in pinned", "room -= 1",
           "test_d_cache.py:test_d7_two_owners_pin_one_page_until_both_let_go", "a page with two pins counts twice"),
    Mutant("D8", "newcomers.py:Admission._admit", "step.grow(row, now)", "step.grow(row, need)",
           "test_d_cache.py:test_d8_eviction_comes_when_the_pages_are_written", "a promise evicts"),
    Mutant("D8", "commit.py:_commit_chunk", "adopt=adopt)", "adopt=adopt) if chunk.last else None",
           "test_d_cache.py:test_d8_prompt_pages_enter_at_the_commit_that_computes_them", "pages of a chunk wait for the last one"),
    Mutant("D8", "ending.py:end", "core.leave(live, donate=good, valid=valid)", "core.leave(live, donate=True, valid=computed)",
           "test_d_cache.py:test_d8_at_abort_private_pages_are_freed_and_cached_ones_stay", "private pages of an aborted request are kept"),
    # F
    Mutant("F1", "liveness/progress.py:stalled", "core.step - core.progress_step >= core.config.stall_steps", "core.step - core.progress_step > core.config.stall_steps",
           "test_f_liveness.py:test_f1_stalled_after_so_many_steps_without_progress", "a step late"),
    Mutant("F1", "commit.py:_commit_chunk", "if end_at > live.highwater:", "if True:",
           "test_f_liveness.py:test_f1_what_is_computed_again_is_no_progress", "recomputing the same five tokens looks alive"),
    Mutant("F1", "liveness/progress.py:stalled", "bool(core.lives) and", "",
           "test_f_liveness.py:test_f1_idle_is_healthy_for_ever", "an idle scheduler is stalled"),
    Mutant("F1", "ending.py:end", "if finish is not Finish.ABORT:  # a", "if True:  # a",
           "test_f_liveness.py:test_f1_clients_that_give_up_are_no_progress", "clients that give up keep it looking alive"),
    Mutant("F1", "commit.py:commit", "core.attempts_committed = core.attempts", "pass",
           "test_f_liveness.py:test_f1_plans_that_are_never_committed_are_a_retry_loop", "a loop that was left behind is named for ever"),
)


def change(mutant: Mutant) -> str:
    """What is written instead of what; lines that stand on both sides are there to find the place, and left out."""
    old, new = mutant.old.splitlines(), mutant.new.splitlines()
    if len(old) != len(new):
        old, new = [line for line in old if line not in new], [line for line in new if line not in old]
    else:
        old, new = ([line for line, other in zip(these, those, strict=True) if line != other] for these, those in ((old, new), (new, old)))
    gone, put = (" ".join(line.strip() for line in lines) for lines in (old, new))
    return f"`{gone}` becomes `{put}`" if put else f"`{gone}` goes"


def table() -> str:
    """The list as docs/laws.md shows it."""
    head = "| Law | Test | Where | Change | What is then seen |\n| --- | --- | --- | --- | --- |\n"
    return head + "".join(
        f"| {mutant.law} | `tests/laws/{mutant.test}` | `src/kvsched/{mutant.where}` | {change(mutant)} | {mutant.seen} |\n" for mutant in MUTANTS
    )


def page(text: str) -> str:
    """The page with the present table in it."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
