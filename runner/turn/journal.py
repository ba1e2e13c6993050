"""A turn's pen: gives out cursors, shows events live, and collects the records that make them durable (DESIGN 3.9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from runner.clock import Clock, rfc3339
from runner.ids import outside_of, record_id
from runner.redaction import Redactor, StreamRedactor
from runner.rules.bounds import BLOCK_CHARS, FRAME_CHARS, QUESTION_BYTES, TEXT_CHARS, VALUE_BYTES, bounded, word
from runner.store.port import RecordRow
from runner.terms import EventType
from runner.turn.log import Chunk, SessionLog
from runner.wire.codec import EventFormatter, halves, is_torn, storable, storable_json, to_json

WHOLE: Final = frozenset(
    {EventType.USER_MESSAGE, EventType.TOOL_CALL, EventType.TOOL_CALL_UPDATE, EventType.INTERACTION_REQUESTED}
)
"""Events that are not cut as a whole: a client's own words, and what consists of bounded parts."""


class Head:
    """The session's newest cursor; survives its turns."""

    def __init__(self, epoch: int = 0, n: int = 0) -> None:
        self.epoch = epoch
        self.n = n
        self._blocks = (epoch, 0)

    def block(self) -> int:
        """The next number of a message or thought of this epoch, whoever writes it."""
        epoch, count = self._blocks
        self._blocks = (self.epoch, count + 1 if epoch == self.epoch else 1)
        return self._blocks[1]

    @property
    def cursor(self) -> tuple[int, int]:
        """(epoch, n)."""
        return self.epoch, self.n

    def take(self, count: int = 1) -> int:
        """The first of ``count`` fresh numbers."""
        first = self.n + 1
        self.n += count
        return first


class Block:
    """A message or thought that is being streamed: its text is the exact concatenation of its chunks.

    ``first`` is the cursor of its first frame, ``given`` the agent's own message id, ``half`` the first half of a
    character of which the agent has not said the second one yet.
    """

    def __init__(self, kind: str, message_id: str, given: str | None, stream: StreamRedactor) -> None:
        self.kind = kind
        self.message_id = message_id
        self.given = given
        self.first = ""
        self.half = ""
        self.parts: list[str] = []
        self.chars = 0
        self.stream = stream

    def mended(self, chunks: list[str]) -> list[str]:
        """The chunks without halves of characters: joined where two belong together, else U+FFFD."""
        whole = []
        for chunk in chunks:
            text, self.half = halves(self.half + chunk)
            whole.append(text)
        return whole

    def rest(self) -> str:
        """Masked text that was held back until now: nothing follows any more."""
        half, self.half = "\ufffd" if self.half else "", ""
        return (self.stream.feed(half) if half else "") + self.stream.flush()


class Journal:
    """Writes one turn's events in order.

    ``collect`` takes records that must become durable; the owner decides when. Every event shown gets the next cursor.
    ``keep`` gets what is about to be shown and is not durable yet, so that a kill of the process does not lose it; and
    the same in fewer bytes, where frames have such a form.
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
        keep: Callable[[Chunk, bytes], None] | None = None,
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

    def _append(self, chunk: Chunk, short: bytes = b"") -> None:
        if self._held is not None:
            self._held.append(chunk)
            return
        if self._keep is not None:
            self._keep(chunk, short)
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
        encoded = self._encoded(type, data)
        n = self.head.take()
        epoch = self.head.epoch
        at = self._clock.now_ms()
        cursor, instant = f"{epoch}.{n}", rfc3339(at)
        kind, body, whole = type, encoded, b""
        if durable and as_record is not None:
            kind, body = as_record[0], self._encoded(*as_record)
            whole = self._formatter.line(cursor, instant, kind, body)
        line = self._formatter.line(cursor, instant, type, encoded)
        self._append(Chunk(epoch, n, n, self.prompt_id, line, whole, durable))
        if durable:
            self._record(kind, body, n, at)

    def fitted(self, value: Any) -> Any:
        """A JSON value of the agent's as a row may hold it: masked, storable and bounded."""
        encoded = to_json(value)
        return storable(self.redactor.tree(value) if len(encoded) <= QUESTION_BYTES else self.cut(value, encoded))

    def cut(self, value: Any, encoded: bytes) -> Any:
        """A JSON value of the agent's that is too large, masked and bounded."""
        masked = self.redactor.text(encoded.decode()).encode() if self.redactor else encoded
        return bounded(value, masked, self.redactor.tree)

    def _encoded(self, type: str, data: dict[str, Any]) -> bytes:
        """An event's JSON: masked, storable, and bounded."""
        if type in WHOLE:
            return storable_json(self.redactor.tree(data))
        encoded = storable_json(data)
        if len(encoded) > VALUE_BYTES:
            return storable_json(self.cut(data, encoded))
        return storable_json(self.redactor.tree(data)) if self.redactor else encoded

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
        joined = "".join(chunks)
        if block.half or is_torn(joined):
            chunks = block.mended(chunks)
        if self.redactor:
            chunks = [block.stream.feed(chunk) for chunk in chunks]
        for run in [chunks] if len(joined) <= FRAME_CHARS else _runs(chunks):
            shown = [chunk for chunk in run if chunk]
            if shown:
                block = self._stream(block, shown)
        return given_text

    def _stream(self, block: Block, chunks: list[str]) -> Block:
        """Show chunks; the block that goes on."""
        self._deltas(block, chunks)
        if block.chars < BLOCK_CHARS:
            return block
        # The next block goes on with the same stream: a secret, or a character, may lie across the border.
        self._record_block(block)
        after = self._open_block(block.kind, block.given, block.stream)
        after.half = block.half
        return after

    def _open_block(self, kind: str, given: str | None, stream: StreamRedactor) -> Block:
        number = self.head.block()
        message_id = word(self.redactor.text(given)) if given else f"m{self.head.epoch}-{number}"
        self._block = Block(kind, message_id, given, stream)
        return self._block

    def _deltas(self, block: Block, chunks: list[str]) -> None:
        type = EventType.MESSAGE_DELTA if block.kind == "message" else EventType.THOUGHT_DELTA
        first = self.head.take(len(chunks))
        at = rfc3339(self._clock.now_ms())
        lines, short = self._formatter.deltas(self.head.epoch, first, at, type, block.message_id, chunks)
        self._append(Chunk(self.head.epoch, first, first + len(chunks) - 1, self.prompt_id, lines), short)
        block.first = block.first or f"{self.head.epoch}.{first}"
        joined = "".join(chunks)
        block.parts.append(joined)
        block.chars += len(joined)

    def close_block(self) -> None:
        """End the open message or thought: its record supersedes its frames."""
        block, self._block = self._block, None
        if block is None:
            return
        rest = block.rest()
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
        encoded = storable_json(data)
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


def _runs(chunks: list[str]) -> Iterator[list[str]]:
    """A large batch in parts of ``FRAME_CHARS``, longer chunks cut into several."""
    run: list[str] = []
    room = FRAME_CHARS
    for chunk in chunks:
        for start in range(0, len(chunk), FRAME_CHARS):
            part = chunk[start : start + FRAME_CHARS]
            if len(part) > room:
                yield run
                run, room = [], FRAME_CHARS
            run.append(part)
            room -= len(part)
    yield run
