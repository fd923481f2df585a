"""Memory: page pool, radix prefix cache, and what they are made of. See `kvsched.protocols` for what each must do."""

from kvsched.memory.eviction import POLICIES, EvictionPolicy, Usage
from kvsched.memory.node import RadixHandle
from kvsched.memory.null import NullCache
from kvsched.memory.page_pool import PagePool
from kvsched.memory.radix import RadixCache

__all__ = ["POLICIES", "EvictionPolicy", "NullCache", "PagePool", "RadixCache", "RadixHandle", "Usage"]
