"""A model's chat template: messages in, the text of a prompt out.

What does not live here: token ids, and the guard against control tokens in what a user wrote (`tokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatError(ValueError):
    """These messages cannot become a prompt: the model has no template, or its template refuses them."""


class ChatTemplate:
    """A Jinja template as model files carry it, in a sandbox that gives it no file, no module and no clock.

    source: the template. names: special tokens by what templates call them (bos_token, eos_token, ...).
    A template may use `raise_exception(message)`, the filter `tojson` and loop controls. `strftime_now` is not there:
    a prompt does not depend on the time of day, and a template that tests for it takes its own fixed date.
    Raises `ValueError` for a source that is no template.
    """

    def __init__(self, source: str, names: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as fault:
            raise ValueError(f"the chat template is no Jinja template that this sandbox reads (line {fault.lineno}): {fault.message}") from fault
        self._names = dict(names or {})

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text. Raises `ChatError` with the template's own words where it refuses."""
        try:
            return self._template.render(messages=[dict(message) for message in messages], tools=None, documents=None,
                                         add_generation_prompt=add_generation_prompt, **self._names)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as fault:
            raise ChatError(f"the model's chat template refuses these messages: {fault}") from fault


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, *, ensure_ascii: bool = False, sort_keys: bool = False,
             separators: tuple[str, str] | None = None) -> str:
    """JSON for a prompt: as it is read, without the escapes that HTML needs."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys, separators=separators)
