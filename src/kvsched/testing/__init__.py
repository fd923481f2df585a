"""Fakes, plain models and conformance suites, public: run them on your own pool, cache, executor and scheduler.

What lives here: what a test needs. Nothing in `kvsched` outside this package imports it.
"""

from kvsched.testing.executor import ExecutorViolation, SimulatedExecutor

__all__ = ["ExecutorViolation", "SimulatedExecutor"]
