"""Rules that answer in place of the service, or after it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Fault:
    """One rule.

    Attributes:
        match: a regular expression, searched in ``METHOD /path``, or ``PREVIEW <sandbox id> <port>`` at the preview
            proxy.
        times: how often it applies; a negative number is for ever.
        skip: so many matches are left alone first.
        status: answer with this status; 0 lets the request through after ``delay``.
        message, code, source, headers: of that answer; a ``body`` replaces its JSON.
        delay: seconds before anything else.
        drop: ``before``: the connection is cut and nothing was done; ``after``: it was done and the answer is lost.
    """

    match: str
    times: int = 1
    skip: int = 0
    status: int = 0
    message: str = ""
    code: str | None = None
    source: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    delay: float = 0.0
    drop: str = ""

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Fault:
        """From JSON; ``ValueError`` when it is not one."""
        known = {entry.name for entry in fields(cls)}
        if unknown := set(document) - known:
            raise ValueError(f"unknown: {sorted(unknown)}")
        if not isinstance(document.get("match"), str):
            raise ValueError("match is missing")
        drop = document.get("drop", "")
        fault = cls(**{**document, "drop": "before" if drop is True else drop or ""})
        if fault.drop not in ("", "before", "after"):
            raise ValueError("drop is before or after")
        try:
            re.compile(fault.match)
        except re.error as error:
            raise ValueError(f"match is no expression: {error}") from error
        return fault


class Faults:
    """The rules in force, oldest first; the first that matches applies.

    Attributes:
        hits: the requests that met one.
    """

    def __init__(self) -> None:
        self._rules: list[Fault] = []
        self.hits: list[str] = []

    def add(self, fault: Fault) -> None:
        self._rules.append(fault)

    def clear(self) -> None:
        self._rules.clear()

    def take(self, request: str) -> Fault | None:
        """The rule for a request, used up once."""
        for rule in list(self._rules):
            if not re.search(rule.match, request):
                continue
            if rule.skip > 0:
                rule.skip -= 1
                continue
            if rule.times > 0:
                rule.times -= 1
                if rule.times == 0:
                    self._rules.remove(rule)
            self.hits.append(request)
            return rule
        return None
