"""Aligned tables in plain text for the sizing commands. What does not live here: what is in them."""

from __future__ import annotations

from collections.abc import Sequence

from kvsched.sizing.account import Account
from kvsched.sizing.amounts import gib


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: frozenset[int] | set[int]) -> list[str]:
    """Aligned columns, those of `right` to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  " + "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def items_table(account: Account) -> list[str]:
    """The line items of a rank and their budget."""
    rows = [(item.name, gib(item.bytes), f"{item.bytes:,}", item.provenance.value, item.note) for item in account.items]
    rows.append(("budget", gib(account.budget), f"{account.budget:,}", "", ""))
    return table(("item", "GiB", "bytes", "from", ""), rows, right={1, 2})
