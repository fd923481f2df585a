"""kvsched: the scheduling half of an LLM inference server, as a library."""

from kvsched.config import SchedulerConfig
from kvsched.errors import HostError, InternalError, KvschedError
from kvsched.liveness import Condition, Health
from kvsched.memory import NullCache, PagePool, RadixCache
from kvsched.plan import Agreed, Chunk, Deltas, Ended, Event, Flushed, Outcome, Plan, Status, StepResult
from kvsched.request import Finish, Namespace, Request, State
from kvsched.scheduler import Scheduler
from kvsched.verdict import Accepted, Explanation, RefusalReason, Refused, WaitReason

__all__ = [
    "Accepted", "Agreed", "Chunk", "Condition", "Deltas", "Ended", "Event", "Explanation", "Finish", "Flushed", "Health", "HostError",
    "InternalError", "KvschedError", "Namespace", "NullCache", "Outcome", "PagePool", "Plan", "RadixCache", "RefusalReason",
    "Refused", "Request", "Scheduler", "SchedulerConfig", "State", "Status", "StepResult", "WaitReason",
]
