"""Every exception that kvsched raises, sorted by whose fault it is.

What lives here: exception classes. What does not: refusals. A request that cannot be served is not an error; it is
answered with a `kvsched.verdict.Refused` value.

- `HostError`: the caller did something the contract forbids. Nothing changed; the object is as usable as before.
- `ConfigError`: a configuration cannot work. Nothing was built.
- `InternalError`: a law of kvsched itself is broken. The object must not be used any more; please report it.
"""

from __future__ import annotations


class KvschedError(Exception):
    """Base of every exception raised by kvsched."""


class HostError(KvschedError):
    """The caller broke the contract. The call changed nothing and the object is still usable."""


class InvalidRequest(HostError, ValueError):
    """A field of a `Request`, or an argument of a call, is malformed; the message names it and what was allowed."""


class DuplicateRequest(HostError, ValueError):
    """A live request already has this id."""


class UnknownRequest(HostError, KeyError):
    """No live request has this id."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidResult(HostError, ValueError):
    """A `StepResult` does not match the plan it is committed with."""


class OutOfOrder(HostError):
    """commit or rollback of a plan that is not next in order, already ended, or not of this scheduler."""


class TooManyInFlight(HostError):
    """schedule() while `max_in_flight` plans are already waiting for their commit or rollback."""


class ReentrantCall(HostError):
    """A scheduler method was called from inside one of its own callbacks."""


class HoldRefused(HostError):
    """hold_pages() cannot be done; the message carries the numbers."""


class CallbackFailed(KvschedError):
    """A callback of the host raised. The call itself was done, every other event was delivered, and the object is usable.

    answer: what the call would have returned.
    """

    def __init__(self, message: str, answer: object = None) -> None:
        super().__init__(message)
        self.answer = answer


class PoolExhausted(HostError):
    """A page pool was asked for more pages than it has free."""


class DoubleFree(HostError):
    """A page was given back that is not handed out: already free, reserved, out of range, or named twice."""


class InvalidHandle(HostError):
    """A cache handle that is already unlocked, or that belongs to another cache."""


class ConfigError(KvschedError, ValueError):
    """A configuration is impossible; the message names the key and what was allowed."""


class InternalError(KvschedError):
    """kvsched broke a law of its own. The object is not usable any more."""


class Broken(InternalError):
    """Something raised in the middle of a change: a pool or cache of the host, an interrupt, or kvsched itself.

    The scheduler is in an unknown state and refuses every further call; the first cause is the message and `__cause__`.
    """


class AccountingError(InternalError):
    """The accounting equation, or another invariant that check() tests, does not hold."""
