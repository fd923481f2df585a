"""Measurements of what kvsched itself costs, one module each, with a function `run(**options)` that yields one dict per size.

What does not live here: printing (`kvsched.cli.bench`), and verdicts on the figures. A figure is the median over repeats
where that is said; nothing here is asserted in tests.
"""
