"""What each tenant was served, for the fair order. Tokens are counted as integers: a rollback takes back exactly what was charged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Shares:
    """Tokens served per tenant since it last began from a floor, and that floor. weights: a tenant not named weighs 1."""

    __slots__ = ("_floors", "_tokens", "_weights")

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._floors: dict[str, float] = {}
        self._tokens: dict[str, int] = {}

    def weight(self, tenant: str) -> float:
        """Share of a tenant."""
        return self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """Tokens served, divided by the tenant's weight."""
        return self._floors.get(tenant, 0.0) + self._tokens.get(tenant, 0) / self._weights.get(tenant, 1.0)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens against a tenant's share."""
        self._tokens[tenant] = self._tokens.get(tenant, 0) + tokens

    def take_back(self, tenant: str, tokens: int) -> None:
        """They were not served after all. Nothing where the tenant was forgotten or lifted meanwhile."""
        if tenant in self._tokens:
            self._tokens[tenant] = max(self._tokens[tenant] - tokens, 0)

    def lift(self, tenant: str, others: Iterable[str]) -> None:
        """Raise a tenant that had no work to the least served of the others, so that it cannot save up."""
        least = min(map(self.served, others), default=0.0)
        if self.served(tenant) < least:
            self._floors[tenant] = least
            self._tokens[tenant] = 0

    def forget(self, working: Iterable[str]) -> None:
        """With nobody working forget everybody; with many forgotten names, those whom `lift` would raise anyway. O(tenants)."""
        names = set(working)
        if not names:
            self._floors.clear()
            self._tokens.clear()
        elif len(self._tokens) > 2 * len(names) + 64:
            least = min(map(self.served, names))
            for tenant in [name for name in self._tokens if name not in names and self.served(name) <= least]:
                del self._tokens[tenant]
                self._floors.pop(tenant, None)
