"""Scenario files: a scheduling fault as a file that anyone can run. See `kvsched scenario`.

What does not live here: code. `document` checks a file, `runner` runs it, `expect` compares, `state` reports.
"""

from kvsched.scenario.document import Document, InvalidScenario, load, parse
from kvsched.scenario.expect import STATE, Mismatch, compare
from kvsched.scenario.runner import Report, Runner, run, run_file

__all__ = ["STATE", "Document", "InvalidScenario", "Mismatch", "Report", "Runner", "compare", "load", "parse", "run", "run_file"]
