"""How a turn is shown: the agent's text on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from runner.cli.terminal import plain, print_json, say


class View(Protocol):
    """What shows the lines of a dispatch."""

    def line(self, line: dict[str, Any]) -> None:
        """An event or the result."""
        ...

    def waiting(self, text: str) -> None:
        """What is waited for now."""
        ...

    def close(self) -> None:
        """Nothing more will be shown."""
        ...


class JsonView:
    """Every line as it came."""

    def line(self, line: dict[str, Any]) -> None:
        """One line of JSON."""
        print_json(line)
        sys.stdout.flush()

    def waiting(self, text: str) -> None:
        """Silent."""

    def close(self) -> None:
        """Nothing is open."""


class TextView:
    """For people: at a terminal with a spinner while nothing comes, else plain lines."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Any = None
        self._streamed: set[str] = set()
        self._at_line_start = True
        self._titles: dict[str, str] = {}

    def waiting(self, text: str) -> None:
        """A spinner at a terminal; elsewhere nothing: the events tell."""
        if not self._console.is_terminal or not self._at_line_start:
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        from rich.text import Text

        self._status.update(Text(plain(text)))

    def line(self, line: dict[str, Any]) -> None:
        """Show an event; the result is told by the command's end."""
        show = getattr(self, f"_on_{line.get('type')}", None)
        data = line.get("data")
        if show is not None and isinstance(data, dict):
            show(data)

    def close(self) -> None:
        """End the spinner and the last line."""
        self._quiet()
        if not self._at_line_start:
            self._text("\n")

    def _quiet(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _text(self, text: str) -> None:
        self._quiet()
        sys.stdout.write(plain(text))
        sys.stdout.flush()
        if text:
            self._at_line_start = text.endswith("\n")

    def _note(self, text: str, style: str = "dim") -> None:
        from rich.text import Text

        self._quiet()
        if not self._at_line_start:
            self._text("\n")
        self._console.print(Text(plain(text), style=style))

    def _on_environment(self, data: dict[str, Any]) -> None:
        start, reason = str(data.get("start")), str(data.get("reason") or "")
        why = f"{start}, {reason}" if reason not in ("", start) else start
        if data.get("phase") == "starting":
            self._note(f"starting the agent ({why})")
            self.waiting("starting the agent")
        elif data.get("phase") == "ready":
            self._note(f"agent ready after {float(data.get('elapsed_ms') or 0):.0f} ms ({why})")
            self.waiting("waiting for the agent")

    def _on_message_delta(self, data: dict[str, Any]) -> None:
        self._streamed.add(str(data.get("message_id")))
        self._text(str(data.get("text", "")))

    def _on_message(self, data: dict[str, Any]) -> None:
        """The whole block: only shown when its deltas were not."""
        if str(data.get("message_id")) not in self._streamed:
            self._text(str(data.get("text", "")))

    def _on_tool_call(self, data: dict[str, Any]) -> None:
        call_id, title = str(data.get("tool_call_id")), str(data.get("title") or "")
        self._titles[call_id] = title
        self._note(f"tool {data.get('kind') or 'other'}: {title} [{data.get('status')}]", "cyan")
        self.waiting(f"running {title}")

    def _on_tool_call_update(self, data: dict[str, Any]) -> None:
        if data.get("status") in ("completed", "failed"):
            title = data.get("title") or self._titles.get(str(data.get("tool_call_id")), "")
            self._note(f"tool {data['status']}: {title}", "red" if data["status"] == "failed" else "cyan")
            self.waiting("waiting for the agent")

    def _on_plan(self, data: dict[str, Any]) -> None:
        entries = data.get("entries")
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict):
                self._note(f"plan: {entry.get('content')} [{entry.get('status')}]")

    def _on_notice(self, data: dict[str, Any]) -> None:
        text = data.get("message") or data.get("text")
        if text:
            self._note(f"note: {text}")

    def _on_turn_queued(self, data: dict[str, Any]) -> None:
        self._note(f"queued at position {data.get('position')}")

    def _on_resync(self, data: dict[str, Any]) -> None:
        self._note("some output was not kept and is missing here", "yellow")


def tell_result(result: dict[str, Any]) -> None:
    """The end of a turn on stderr: silent when it completed."""
    error = result.get("error")
    if isinstance(error, dict):
        again = " (trying again may help)" if error.get("retryable") else ""
        say(f"acp-runner: {error.get('code')}: {error.get('message')}{again}")
    elif result.get("outcome") == "cancelled":
        settled = "" if result.get("cancel_settled", True) else "; the agent did not answer and was replaced"
        say(f"acp-runner: stopped{settled}")
    elif result.get("outcome") == "absorbed":
        say("acp-runner: sent together with a later message, whose answer is for both")
    elif not result.get("ok"):
        say(f"acp-runner: the turn ended as {result.get('outcome')}")
    if result.get("context_lost"):
        say("acp-runner: the agent started without its memory of this session")
