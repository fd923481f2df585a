"""Whether things move: monotone signals, and the word that follows from them (law F1)."""

from __future__ import annotations

from kvsched.liveness.progress import Condition, Health, health, stalled

__all__ = ["Condition", "Health", "health", "stalled"]
