"""kvsched: the scheduling half of an LLM inference server, as a library."""
