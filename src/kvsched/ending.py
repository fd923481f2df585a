"""How a request ends, and how what hangs on an ended plan goes back. Used by commit, rollback and abort alike."""

from __future__ import annotations

from kvsched.core import Core
from kvsched.inflight import InFlight
from kvsched.live import Live
from kvsched.plan import Ended
from kvsched.request import Cause, Finish


def end(core: Core, live: Live, finish: Finish) -> Ended:
    """A request is at its end: deliver its record, let go of what it holds."""
    cause = Cause.ABORT if finish is Finish.ABORT else Cause.FINISH
    resident = live.row >= 0
    held = int(core.residents.held[live.row]) if resident else 0
    computed = core.committed(live) if resident else live.highwater
    waited = waited_steps(core, live)
    core.lives.pop(live.id, None)  # before its pages go: a pin is for who ended, not for who was retracted
    core.tenants[live.tenant] -= 1
    if not core.tenants[live.tenant]:
        del core.tenants[live.tenant]
        core.shares.forget(core.tenants)
    if resident:
        core.collect(live)
        row = live.row
        for record in core.naming(row):
            record.dropped.add(row)
        good = finish in (Finish.LENGTH, Finish.STOP)
        valid = min(computed, live.prompt + max(len(live.generated) - 1, 0)) if good else 0
        if good:
            computed = valid
        core.leave(live, donate=good, valid=valid)
    else:
        core.queue.remove(live)
        for record in core.in_flight:
            for row, other in list(record.late.items()):
                if other is live:
                    del record.late[row]
    core.inflight_tokens -= live.uncomputed
    live.uncomputed = 0
    live.move(cause)
    if live.family is not None:
        live.family.members.remove(live)
        if not live.family.members:
            core.parents.pop(live.family.id, None)
    if finish is not Finish.ABORT:  # a client that gives up is no progress
        core.completions += 1
        core.progress_step = max(core.progress_step, core.step)
    core.totals["aborted" if finish is Finish.ABORT else "finished"] += 1
    core.tell("aborted" if finish is Finish.ABORT else "finished", live, finish.name.lower())
    generated = len(live.generated)
    return Ended(live.id, finish, generated, computed, live.cached, held, live.retractions,
                 max(live.max_gap, 1 if generated > 1 else 0), waited, max(live.first_cached, 0))


def waited_steps(core: Core, live: Live) -> int:
    """Passes in which the request waited, over all its stays in the queue."""
    return live.waited + (core.passes - live.submitted_pass if live.row < 0 else 0)


def settle(core: Core, record: InFlight) -> None:
    """The plan has ended: what waited for it goes back, unless an older plan in flight still names the row."""
    for release in record.releases:
        naming = core.naming(release.row)
        if naming:
            naming[-1].releases.append(release)
        else:
            core.settle(release, quarantined=True)
