"""Docstrings as griffe reads them: names that share a description get a line each, and "::" before
an example is one colon."""

from __future__ import annotations

import re
from typing import Any

import griffe

# "    a, b: what both are", at the depth of a section's items.
_SHARED = re.compile(r"^(?P<depth>[ ]{4})(?P<names>\w+(?:, \w+)+): (?P<rest>.*)$")


def separated(text: str) -> str:
    lines: list[str] = []
    pending = text.splitlines()
    while pending:
        line = pending.pop(0)
        found = _SHARED.match(line)
        if found is None:
            lines.append(line)
            continue
        rest = [found["rest"]]
        while pending and pending[0].startswith(found["depth"] + " "):
            rest.append(pending.pop(0))
        for name in found["names"].split(", "):
            lines += [f"{found['depth']}{name}: {rest[0]}", *rest[1:]]
    return "\n".join(lines)


class SharedDescriptions(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = separated(obj.docstring.value)
            obj.docstring.value = re.sub("::$", ":", text, flags=re.MULTILINE)
