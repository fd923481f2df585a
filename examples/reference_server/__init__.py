"""A reference server: kvsched decides every step, a real language model computes it, and the OpenAI client is answered.

Start it with `make serve`, or `PYTHONPATH=examples python -m reference_server --help`.
"""
