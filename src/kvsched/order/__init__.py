"""Who goes first among requests that never held pages. Adding an order is one small class and one line in `ORDERS`."""

from __future__ import annotations

from kvsched.order.orders import ORDERS, Order, Rank, Ranked, View
from kvsched.order.shares import Shares

__all__ = ["ORDERS", "Order", "Rank", "Ranked", "Shares", "View"]
