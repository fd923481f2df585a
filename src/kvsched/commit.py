"""commit(): what a step's result does. Tokens are delivered, chunks enter the cache, requests that are at their end leave.

The result has been held against its plan by `kvsched.results` already. A plan of plain decodes goes a short way; chunks,
speculation, blocks, and rows that left meanwhile go the general one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvsched.core import Core
from kvsched.ending import end, settle
from kvsched.holds import expire
from kvsched.inflight import InFlight, PrefillRow, Release
from kvsched.live import Live
from kvsched.plan import Ended, Outcome
from kvsched.request import Finish
from kvsched.results import Checked
from kvsched.units import Ints, aligned, sealed

_NO_FINISH = np.zeros(1024, dtype=np.int8)
_NO_FINISH.flags.writeable = False


def commit(core: Core, record: InFlight, result: Checked) -> Outcome:
    """Apply a checked result of the oldest plan in flight. Cost: per request that ends and chunk; arrays for the rest."""
    core.in_flight.pop(0)
    plan = record.plan
    core.totals["steps"] += 1
    core.attempts_committed = core.attempts
    if core.holds:
        expire(core, plan.step)
    if not len(plan.rows):
        settle(core, record)
        return Outcome(plan.rows, result.tokens, _NO_FINISH[:0], ())
    if plan.decodes:
        core.decode_steps += 1
    if (result.tokens.ndim == 1 and not record.prefill and not record.dropped and record.blocks is None
            and not len(result.failed) and record.decode_widths is None):
        delivered = result.tokens.copy()  # the host may use its buffer again
        core.log.write(core.residents.index(plan.rows), delivered)
        core.totals["emitted"] += len(delivered)
        core.progress_step = plan.step
        if core.residents.lagging:
            _close_gaps(core, plan.rows, plan.step)
        codes = _codes(core, record, result, delivered)
    else:
        delivered, codes = _deliver(core, record, result)
    if core.config.order == "fair":
        _charge_decodes(core, record)
    if core.log.full:
        _fold_log(core)
    finish = _no_finish(len(plan.rows))
    ended: list[Ended] = []
    if codes:
        finish = np.zeros(len(plan.rows), dtype=np.int8)
        for at in sorted(codes):
            live = _request_at(core, record, at)
            if live is not None:
                finish[at] = codes[at]
                ended.append(end(core, live, Finish(codes[at])))
    settle(core, record)
    return Outcome(plan.rows, delivered, finish, tuple(ended))


def _request_at(core: Core, record: InFlight, at: int) -> Live | None:
    """The live request whom the plan's row is about, retracted ones included; None when it has ended meanwhile."""
    row = int(record.plan.rows[at])
    if row not in record.dropped:
        return core.residents.live[row]
    live = record.late.get(row)
    if live is None and at >= record.plan.decodes:
        live = record.prefill[at - record.plan.decodes].live
    return live if live is not None and core.lives.get(live.id) is live else None


def _no_finish(count: int) -> npt.NDArray[np.int8]:
    if count <= len(_NO_FINISH):
        return _NO_FINISH[:count]
    finish = np.zeros(count, dtype=np.int8)
    finish.flags.writeable = False
    return finish


def _codes(core: Core, record: InFlight, result: Checked, tokens: npt.NDArray[np.signedinteger[Any]]) -> dict[int, int]:
    """Finish codes by position for a plan of plain decodes."""
    codes: dict[int, int] = {}
    for at in record.ending.tolist():
        codes[at] = Finish.LENGTH
    for at in result.finished.tolist():
        codes[at] = Finish.STOP
    if core.stops:
        for at in _stop_candidates(core, tokens):
            live = core.residents.live[int(record.plan.rows[at])]
            if live is not None and _stops(core, live, int(tokens[at])):
                codes[at] = Finish.STOP
    return codes


def _stop_candidates(core: Core, tokens: npt.NDArray[np.signedinteger[Any]]) -> list[int]:
    """Positions whose token is a stop token of somebody. O(rows) per distinct stop token, up to a few of them."""
    if len(core.stops) == 1:
        (stop,) = core.stops
        at: list[int] = (tokens == stop).nonzero()[0].tolist()
        return at
    if len(core.stops) <= 4:
        hits: set[int] = set()
        for stop in core.stops:
            hits.update((tokens == stop).nonzero()[0].tolist())
        return sorted(hits)
    return list(np.isin(tokens, np.fromiter(core.stops, dtype=np.int64)).nonzero()[0].tolist())


def _stops(core: Core, live: Live, token: int) -> bool:
    """Whether this token, already counted, ends the request."""
    if token not in live.stops:
        return False
    least = live.request.min_new_tokens
    return not least or core.emitted(live) >= least


def _deliver(core: Core, record: InFlight, result: Checked) -> tuple[npt.NDArray[np.signedinteger[Any]], dict[int, int]]:
    """The general way: chunks, speculation, blocks, dropped and late rows. Returns delivered tokens and finish codes."""
    plan = record.plan
    tokens = result.tokens if result.tokens.ndim == 2 else result.tokens[:, None]
    count = len(plan.rows)
    decodes = plan.decodes
    taken = np.ones(count, dtype=np.int64)  # tokens delivered per row
    codes: dict[int, int] = {}
    if record.decode_widths is not None and result.accepted is not None:
        taken[:decodes] += result.accepted[:decodes]
    for index, entry in enumerate(record.prefill):
        if not entry.chunk.last or entry.live.limit == 0:
            taken[decodes + index] = 0
    own = np.ones(count, dtype=bool)  # rows whose request is still resident there
    for row in record.dropped:
        at = record.position(row)
        own[at] = False
        if row not in record.late:
            taken[at] = 0
    taken[result.failed] = 0
    left_out = _return_slots(core, record, taken, own)
    if record.blocks is not None:
        _close_blocks(core, record, record.blocks, result.final, taken, own)
    taken = _until_stop(core, record, tokens, taken)
    delivered = np.where(np.arange(tokens.shape[1]) < taken[:, None], tokens, -1)
    leaving = record.releases + [release for newer in core.in_flight for release in newer.releases]
    for release in leaving:
        at = record.position(release.row)
        if 0 <= at < decodes and taken[at]:
            release.valid += int(taken[at])  # not from `starts`, which assumes that drafts in flight are accepted
            release.live.highwater = max(release.live.highwater, release.valid)
    failed = set(result.failed.tolist())
    for index, entry in enumerate(record.prefill):
        _commit_chunk(core, record, entry, leaving, failed=decodes + index in failed)
    _store_delivered(core, record, delivered, taken, own)
    for row in left_out:
        core.residents.watch(row, plan.step)
    if taken.any():
        core.progress_step = plan.step
    core.totals["emitted"] += int(taken.sum())
    _finish_codes(core, record, result, tokens, taken, own, codes)
    return (delivered if result.tokens.ndim == 2 else delivered[:, 0]), codes


def _return_slots(core: Core, record: InFlight, taken: Ints, own: npt.NDArray[np.bool_]) -> list[int]:
    """Slots of drafts that were not accepted count as uncomputed again; the row can go on.

    Returns rows that seemed to be at their end, so that a later step has left them out already.
    """
    if record.decode_widths is None:
        return []
    residents, decodes = core.residents, record.plan.decodes
    plain = own[:decodes].copy()
    if record.blocks is not None:
        plain &= ~record.blocks
    rows = record.decode_rows[plain]
    residents.ctx[rows] -= record.decode_widths[plain] - np.maximum(taken[:decodes][plain], 1)
    again = rows[(residents.ctx[rows] < residents.total[rows]) & ~residents.active[rows]]
    for row in again.tolist():
        residents.set_active(row, value=True)
    return [row for row in again.tolist() if core.step > record.plan.step and not core.naming(row)]


def _close_blocks(core: Core, record: InFlight, blocks: npt.NDArray[np.bool_], final: Ints, taken: Ints,
                  own: npt.NDArray[np.bool_]) -> None:
    """A block that became final moves its request on by its width and delivers that many tokens; others deliver none."""
    residents = core.residents
    closed = set(final.tolist())
    for at in blocks.nonzero()[0].tolist():
        taken[at] = record.plan.counts[at] if at in closed and taken[at] else 0
        if own[at]:
            row = int(record.decode_rows[at])
            residents.ctx[row] += taken[at]
            residents.set_active(row, bool(residents.ctx[row] < residents.total[row]))


def _until_stop(core: Core, record: InFlight, tokens: npt.NDArray[np.signedinteger[Any]], taken: Ints) -> Ints:
    """Tokens per row up to and with the first that stops the request. Only rows of several tokens can lose any."""
    cut = taken.copy()
    if not core.stops and not record.late:
        return cut
    for at in (taken > 1).nonzero()[0].tolist():
        row = int(record.plan.rows[at])
        live = record.late.get(row) or core.residents.live[row]
        if live is None or not live.stops:
            continue
        had = core.emitted(live)
        for index in range(int(taken[at])):
            if int(tokens[at, index]) in live.stops and had + index + 1 >= live.request.min_new_tokens:
                cut[at] = index + 1
                break
    return cut


def _commit_chunk(core: Core, record: InFlight, entry: PrefillRow, leaving: list[Release], *, failed: bool) -> None:
    """One chunk was computed: counters, the in-flight prompt count, progress, and its pages into the cache."""
    live, chunk = entry.live, entry.chunk
    end_at = chunk.start + chunk.length
    core.chunks += 1
    core.totals["prefill_tokens"] += chunk.length
    core.totals["recomputed_tokens"] += max(0, min(end_at, live.highwater) - chunk.start)
    for release in leaving:
        if release.row == chunk.row and core.lives.get(live.id) is live:  # a host may skip rows of those who are gone
            release.valid = max(release.valid, 0 if failed else end_at)
    if chunk.row in record.dropped and live.row != chunk.row:
        live.highwater = max(live.highwater, 0 if failed else end_at)
        return
    if failed:
        return
    if end_at > live.highwater:
        live.highwater = end_at
        core.progress_step = record.plan.step
    counted = max(live.prompt - end_at, 0)
    if counted < live.uncomputed:
        core.inflight_tokens -= live.uncomputed - counted
        live.uncomputed = counted
    adopt = core.config.exchange_pages and not core.naming(chunk.row)
    core.store_prefix(live, aligned(min(end_at, live.target), core.config.page_size), adopt=adopt)
    if chunk.last:
        core.prefilling.pop(live.id, None)


def _store_delivered(core: Core, record: InFlight, delivered: npt.NDArray[np.signedinteger[Any]], taken: Ints,
                     own: npt.NDArray[np.bool_]) -> None:
    """Delivered tokens go to the log, those of retracted requests to their records."""
    rows = record.plan.rows
    for row, live in record.late.items():
        at = record.position(row)
        live.late -= 1
        if taken[at]:
            if live.last_token_step >= 0:
                live.max_gap = max(live.max_gap, record.plan.step - live.last_token_step)
            live.last_token_step = record.plan.step
            live.generated = sealed(np.concatenate((live.generated, delivered[at, : taken[at]].astype(np.int32))))
            live.target = live.prompt + len(live.generated)
            live.hint_seen = -1
    for column in range(delivered.shape[1]):
        mask = (taken > column) & own
        if not mask.any():
            break
        core.log.write(rows[mask], delivered[mask, column].astype(np.int32))
        if column == 0 and (core.residents.lagging or core.residents.blocks):
            _close_gaps(core, rows[mask], record.plan.step)


def _close_gaps(core: Core, rows: Ints, step: int) -> None:
    """Rows that got a token after a step without one: note the gap.

    A block row gets tokens in some of its passes only, so it is watched all the time.
    """
    residents = core.residents
    back = rows[residents.lag[rows] & (residents.last_emit[rows] < step)]
    if len(back):
        residents.gap[back] = np.maximum(residents.gap[back], step - residents.last_emit[back])
        residents.last_emit[back] = step
        # a newer plan in flight that leaves a row out has begun its next gap already
        left_out = ~np.isin(back, core.in_flight[-1].plan.rows) if core.in_flight else False
        residents.lag[back] = (residents.block[back] > 0) | left_out
        residents.lagging -= int((~residents.lag[back]).sum())
    if residents.blocks:
        first = rows[(residents.block[rows] > 0) & ~residents.lag[rows]]
        residents.lag[first] = True
        residents.last_emit[first] = step
        residents.lagging += len(first)


def _finish_codes(core: Core, record: InFlight, result: Checked, tokens: npt.NDArray[np.signedinteger[Any]], taken: Ints,
                  own: npt.NDArray[np.bool_], codes: dict[int, int]) -> None:
    """Add the finish code of every row that is at its end; the strongest word last."""
    plan, residents = record.plan, core.residents
    decodes = plan.decodes
    there = own.copy()
    for row in record.late:
        there[record.position(row)] = True
    if record.decode_widths is None:
        full = [at for at in record.ending.tolist() if own[at]]
    else:
        rows = record.decode_rows
        near = (residents.ctx[rows] >= residents.total[rows]) & own[:decodes]
        full = [at for at in near.nonzero()[0].tolist()
                if (live := residents.live[int(rows[at])]) is not None and core.committed(live) == live.total]
    codes.update(dict.fromkeys(full, Finish.LENGTH))
    for index, entry in enumerate(record.prefill):
        at, live = decodes + index, entry.live
        if there[at] and entry.chunk.last and (live.limit == 0 or (taken[at] and core.emitted(live) >= live.limit)):
            codes[at] = Finish.LENGTH
    for row, live in record.late.items():
        at = record.position(row)
        if taken[at] and len(live.generated) >= live.limit:
            codes[at] = Finish.LENGTH
    codes.update({at: Finish.STOP for at in result.finished.tolist() if _request_at(core, record, at) is not None})
    if core.stops or record.late:
        final = tokens[np.arange(len(taken)), np.maximum(taken - 1, 0)]
        maybe = set(_stop_candidates(core, final)) if core.stops else set()
        maybe.update(record.position(row) for row in record.late)
        for at in maybe:
            live_at = _request_at(core, record, at)
            if taken[at] and there[at] and live_at is not None and _stops(core, live_at, int(final[at])):
                codes[at] = Finish.STOP
    codes.update({at: Finish.ERROR for at in result.failed.tolist() if _request_at(core, record, at) is not None})


def _charge_decodes(core: Core, record: InFlight) -> None:
    """Fair order: a decoded token counts against its tenant."""
    for row in record.decode_rows.tolist():
        live = core.residents.live[row]
        if live is not None and row not in record.dropped:
            core.shares.charge(live.tenant, 1)


def _fold_log(core: Core) -> None:
    """The token log is long: residents take their part of the oldest block into their records."""
    log = core.log
    until = log.oldest_end
    for live in core.residents:
        if live.since < until:
            live.generated = sealed(np.concatenate((live.generated, log.read_oldest(live.row, live.since))))
            live.since = until
    log.fold()
