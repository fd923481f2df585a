"""Fakes, plain models and conformance suites, public: run them on your own pool, cache, executor and scheduler.

What lives here: what a test needs. Nothing in `kvsched` outside this package imports it. What needs hypothesis is
imported from its own module: `kvsched.testing.machine.scheduler_machine`; for a page pool `PoolConformance` and
`pool_machine` of `kvsched.testing.pool_suite`; for a tree cache `CacheConformance` and `cache_machine` of
`kvsched.testing.cache_suite`.
"""

from kvsched.testing.driver import RunFailed, Tally, drive
from kvsched.testing.executor import ExecutorViolation, SimulatedExecutor
from kvsched.testing.host import CheckedHost, Parts
from kvsched.testing.model import ModelViolation, PlainModel

__all__ = ["CheckedHost", "ExecutorViolation", "ModelViolation", "Parts", "PlainModel", "RunFailed", "SimulatedExecutor", "Tally", "drive"]
