"""The commitment ledger: prefill that was promised at admission and is not yet computed, in tokens (law B6).

It belongs to the scheduler, not to a batch: entries are keyed by request id and live across steps. What does not live
here: the decode reservation, which is derived (see `kvsched.admission.budget`) and stored nowhere.
"""

from __future__ import annotations

from kvsched.errors import InternalError


class CommitmentLedger:
    """Tokens of prefill committed per request, spent chunk by chunk.

    enforced=False keeps the books but tells the budget not to read them. Only the simulator does that, to show the
    deadlock that follows (`kvsched replay --no-ledger`).

    >>> ledger = CommitmentLedger()
    >>> ledger.commit("a", 80_000)
    >>> 100_000 - ledger.outstanding
    20000
    >>> ledger.spend("a", 30_000); ledger.outstanding
    50000
    >>> ledger.release("a"), ledger.outstanding
    (50000, 0)
    """

    __slots__ = ("_open", "chunks", "enforced", "outstanding")

    def __init__(self, *, enforced: bool = True) -> None:
        self._open: dict[str, int] = {}
        self.outstanding = 0
        self.chunks = 0
        self.enforced = enforced

    def __contains__(self, key: str) -> bool:
        return key in self._open

    def owed(self, key: str) -> int:
        """Tokens still committed to `key`, 0 when there is no entry."""
        return self._open.get(key, 0)

    def commit(self, key: str, tokens: int) -> None:
        """Open an entry of `tokens`. Raises `InternalError` when there is one already, or for a negative amount."""
        if key in self._open or tokens < 0:
            raise InternalError(f"ledger: commit of {tokens} for {key!r}, which has {self._open.get(key)}")
        self._open[key] = tokens
        self.outstanding += tokens

    def spend(self, key: str, tokens: int) -> None:
        """Move `tokens` from promised to computed. Raises `InternalError` for more than is committed."""
        owed = self._open.get(key)
        if owed is None or not 0 <= tokens <= owed:
            raise InternalError(f"ledger: spend of {tokens} for {key!r}, which has {owed}")
        self._open[key] = owed - tokens
        self.outstanding -= tokens
        self.chunks += 1

    def unspend(self, key: str, tokens: int) -> None:
        """Give back what a rolled-back step spent. The count of chunks only rises, so it stays."""
        self._open[key] += tokens
        self.outstanding += tokens

    def release(self, key: str) -> int:
        """Close the entry and return what was left of it; 0 when there is none."""
        owed = self._open.pop(key, 0)
        self.outstanding -= owed
        return owed

    def check(self) -> None:
        """Raise `InternalError` unless the sum stands for its parts and no entry is negative."""
        if sum(self._open.values()) != self.outstanding or any(owed < 0 for owed in self._open.values()):
            raise InternalError(f"ledger: outstanding {self.outstanding} is not the sum of {self._open}")
