"""The simulator: traces and invented workloads through the real scheduler, under a simulated clock.

Rooms: `trace` (files), `workload` (distributions), `cost` (what a step takes), `replay` (the loop), `report` (figures).
Clocks and seeded generators are allowed here, and nowhere below.
"""
