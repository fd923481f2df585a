"""kvsched as vLLM's scheduler: `--scheduler-cls kvsched.hosts.vllm.KvschedScheduler`. Importing this imports vLLM.

kvsched decides order, admission, chunks, prefix reuse, eviction and retraction, and owns the pages; vLLM runs the model.
See docs/hosts.md for versions, settings and what is refused.
"""

from kvsched.hosts.vllm.scheduler import KvschedScheduler

__all__ = ["KvschedScheduler"]
