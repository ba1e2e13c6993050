"""A turn's pen: gives out cursors, shows events live, and collects the records that make them durable (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from runner.clock import Clock, rfc3339
from runner.ids import outside_of, record_id
from runner.redaction import Redactor, StreamRedactor
from runner.store.port import RecordRow
from runner.terms import EventType
from runner.turn.log import Chunk, SessionLog
from runner.wire.codec import EventFormatter, to_json

BLOCK_CHARS: Final = 4 * 1024 * 1024
TEXT_CHARS: Final = 16 * 1024 * 1024


class Head:
    """The session's newest cursor; survives its turns."""

    def __init__(self, epoch: int = 0, n: int = 0) -> None:
        self.epoch = epoch
        self.n = n

    def take(self, count: int = 1) -> int:
        """The first of ``count`` fresh numbers."""
        first = self.n + 1
        self.n += count
        return first


class Block:
    """A message or thought that is being streamed: its text is the exact concatenation of its chunks.

    ``first`` is the cursor of its first frame, ``given`` the agent's own message id.
    """

    def __init__(self, kind: str, message_id: str, given: str | None, stream: StreamRedactor) -> None:
        self.kind = kind
        self.message_id = message_id
        self.given = given
        self.first = ""
        self.parts: list[str] = []
        self.chars = 0
        self.stream = stream


class Journal:
    """Writes one turn's events in order.

    ``collect`` takes records that must become durable; the owner decides when. Every event shown gets the next cursor.
    ``keep`` gets what is about to be shown and is not durable yet, so that a kill of the process does not lose it.
    """

    def __init__(
        self,
        *,
        project: str,
        session_id: str,
        turn_id: str | None,
        prompt_id: str | None,
        head: Head,
        log: SessionLog,
        clock: Clock,
        redactor: Redactor,
        collect: Callable[[RecordRow], None],
        append: Callable[[Chunk], None] | None = None,
        keep: Callable[[Chunk], None] | None = None,
    ) -> None:
        self.project = project
        self.session_id = session_id
        self.turn_id = turn_id
        self.prompt_id = prompt_id
        self.head = head
        self._log = log
        self._shows = append if append is not None else log.append
        self._keep = keep
        self._clock = clock
        self.redactor = redactor
        self._collect = collect
        self._formatter = EventFormatter(turn_id, prompt_id)
        self._block: Block | None = None
        self._blocks = 0
        self._texts: list[str] = []
        self._chars = 0
        self.truncated = False
        self._held: list[Chunk] | None = None

    def of_prompt(self, prompt_id: str) -> None:
        """From now on events belong to this prompt."""
        if prompt_id != self.prompt_id:
            self.close_block()
            self.prompt_id = prompt_id
            self._formatter = EventFormatter(self.turn_id, prompt_id)

    def hold(self) -> None:
        """From now on events get cursors and records, and are shown only by ``release``: once they are durable."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Show what was held."""
        held, self._held = self._held or [], None
        for chunk in held:
            self._shows(chunk)

    def discard(self) -> None:
        """Forget what was held: it did not become durable and never will."""
        self._held = None

    def outside(self) -> Journal:
        """A pen for events of the session itself; what it writes is held and released together with this one's."""
        return Journal(
            project=self.project,
            session_id=self.session_id,
            turn_id=None,
            prompt_id=None,
            head=self.head,
            log=self._log,
            clock=self._clock,
            redactor=self.redactor,
            collect=self._collect,
            append=self._append,
        )

    def _append(self, chunk: Chunk) -> None:
        if self._held is not None:
            self._held.append(chunk)
            return
        if self._keep is not None:
            self._keep(chunk)
        self._shows(chunk)

    @property
    def text(self) -> str:
        """All message text of the turn so far."""
        return "".join(self._texts)

    def event(self, type: EventType, data: dict[str, Any], *, durable: bool = True, as_record: Any = None) -> None:
        """Show one event; a durable one becomes a record of the same cursor.

        Args:
            type: the event's type.
            data: its payload, masked before it is shown.
            durable: False for frames, which only live readers need.
            as_record: ``(type, data)`` of the record when it differs from the event.
        """
        if self._block is not None:
            self.close_block()
        self._show(type, data, durable, as_record)

    def _show(self, type: EventType, data: dict[str, Any], durable: bool, as_record: Any = None) -> None:
        encoded = to_json(self.redactor.tree(data))
        n = self.head.take()
        epoch = self.head.epoch
        at = self._clock.now_ms()
        cursor, instant = f"{epoch}.{n}", rfc3339(at)
        kind, body, whole = type, encoded, b""
        if durable and as_record is not None:
            kind, body = as_record[0], to_json(self.redactor.tree(as_record[1]))
            whole = self._formatter.line(cursor, instant, kind, body)
        line = self._formatter.line(cursor, instant, type, encoded)
        self._append(Chunk(epoch, n, n, self.prompt_id, line, whole, durable))
        if durable:
            self._record(kind, body, n, at)

    def _record(self, type: str, data: bytes, n: int, at: int) -> None:
        self._collect(
            RecordRow(
                self.project,
                self.session_id,
                record_id(self.session_id, self.turn_id or outside_of(self.head.epoch), n),
                self.turn_id,
                self.prompt_id,
                self.head.epoch,
                n,
                type,
                data,
                at,
            )
        )

    def texts(self, kind: str, given: str | None, chunks: list[str]) -> bool:
        """Stream text chunks of one message (``kind`` is ``message`` or ``thought``); whether any text was in them."""
        block = self._block
        if block is None or block.kind != kind or (given is not None and block.given not in (None, given)):
            self.close_block()
            block = self._open_block(kind, given, StreamRedactor(self.redactor))
        elif given is not None and block.given is None:
            block.given = given
        given_text = any(chunks)
        if self.redactor:
            chunks = [block.stream.feed(chunk) for chunk in chunks]
        chunks = [chunk for chunk in chunks if chunk]
        if chunks:
            self._deltas(block, chunks)
            if block.chars >= BLOCK_CHARS:
                # The next block goes on with the same stream: a secret may lie across the border.
                self._record_block(block)
                self._open_block(kind, block.given, block.stream)
        return given_text

    def _open_block(self, kind: str, given: str | None, stream: StreamRedactor) -> Block:
        self._blocks += 1
        message_id = self.redactor.text(given) if given else f"m{self.head.epoch}-{self._blocks}"
        self._block = Block(kind, message_id, given, stream)
        return self._block

    def _deltas(self, block: Block, chunks: list[str]) -> None:
        type = EventType.MESSAGE_DELTA if block.kind == "message" else EventType.THOUGHT_DELTA
        first = self.head.take(len(chunks))
        at = rfc3339(self._clock.now_ms())
        lines = self._formatter.delta_lines(self.head.epoch, first, at, type, block.message_id, chunks)
        self._append(Chunk(self.head.epoch, first, first + len(chunks) - 1, self.prompt_id, lines))
        block.first = block.first or f"{self.head.epoch}.{first}"
        joined = "".join(chunks)
        block.parts.append(joined)
        block.chars += len(joined)

    def close_block(self) -> None:
        """End the open message or thought: its record supersedes its frames."""
        block, self._block = self._block, None
        if block is None:
            return
        rest = block.stream.flush()
        if rest:
            self._deltas(block, [rest])
        self._record_block(block)

    def _record_block(self, block: Block) -> None:
        text = "".join(block.parts)
        if not text:
            return
        if block.kind == "message":
            self._tell(text)
        type = EventType.MESSAGE if block.kind == "message" else EventType.THOUGHT
        data = {"message_id": block.message_id, "text": text, "supersedes_from": block.first}
        encoded = to_json(data)
        n = self.head.take()
        at = self._clock.now_ms()
        line = self._formatter.line(f"{self.head.epoch}.{n}", rfc3339(at), type, encoded)
        self._append(Chunk(self.head.epoch, n, n, self.prompt_id, line, durable=True))
        self._record(type, encoded, n, at)

    def _tell(self, text: str) -> None:
        room = TEXT_CHARS - self._chars
        if len(text) > room:
            text, self.truncated = text[:room], True
        self._texts.append(text)
        self._chars += len(text)
