"""The `kvsched` command.

What lives here: the entry point `main`, and what it says where click is missing. What does not: the group (`group`) and
its subcommands, each in a module of its own with a click command named `command`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

MISSING = "kvsched needs the packages of its command line: pip install 'kvsched[cli]'"

main: Callable[..., Any]
"""The click group; without click, a function that says in one line what to install."""


def _without_click(*_: object, **__: object) -> NoReturn:
    sys.exit(MISSING)


try:
    from kvsched.cli.group import group as main
except ModuleNotFoundError as error:
    if error.name != "click":
        raise
    main = _without_click

__all__ = ["MISSING", "main"]
