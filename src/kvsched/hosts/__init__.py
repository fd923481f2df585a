"""kvsched inside servers that nobody here wrote: `kvsched.hosts.vllm`, `kvsched.hosts.transformers`, and what guards them.

Nothing is imported here. An adapter imports its host when it is named, so the library itself needs neither.
"""
