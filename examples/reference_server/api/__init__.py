"""HTTP: bodies, answers and errors as OpenAI's clients expect them, health, metrics, and what the scheduler is doing.

What does not live here: any decision about who runs, waits or is refused. That is kvsched's, and reaches us as values.
"""
