"""The simulator: traces and invented workloads through the real scheduler, under a simulated clock.

Rooms: `trace` (files), `workload` (distributions), `cost` (what a step takes), `replay` (the loop), `report` (figures).
Clocks and seeded generators are allowed here, and nowhere below.
"""

from kvsched.sim.cost import CostModel, LinearCost
from kvsched.sim.replay import ConstantExecutor, Engine, Progress, build, replay
from kvsched.sim.report import Refusals, Report, Spread, Stuck, Wedge, percentile, refusal_lines, table
from kvsched.sim.trace import Arrival, Trace, TraceError, read_trace
from kvsched.sim.workload import Workload, generate

__all__ = [
    "Arrival",
    "ConstantExecutor",
    "CostModel",
    "Engine",
    "LinearCost",
    "Progress",
    "Refusals",
    "Report",
    "Spread",
    "Stuck",
    "Trace",
    "TraceError",
    "Wedge",
    "Workload",
    "build",
    "generate",
    "percentile",
    "read_trace",
    "refusal_lines",
    "replay",
    "table",
]
