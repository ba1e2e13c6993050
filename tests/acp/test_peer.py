"""The sans-I/O core: messages do not depend on how the bytes were cut (cases E1, E3, E4)."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.acp.lines import BAD_LINES, FLOOD_FACTOR
from runner.acp.peer import MIB, Peer, encode, response_id
from tests.acp.bed import line, text_update

NOISE: dict[str, bytes] = {
    "ansi": b"\x1b[32mready\x1b[0m",
    "text": b"INFO migrating the database",
    "string": b'"started"',
    "number": b"42",
    "array": b"[]",
    "array of frames": b'[{"jsonrpc":"2.0","method":"x"}]',
    "null": b"null",
    "true": b"true",
    "broken": b'{"jsonrpc":"2.0","meth',
    "two on a line": b'{"a":1}{"b":2}',
    "bad utf-8": b"\xff\xfe\x80",
    "cut utf-8": "é".encode()[:1],
    "deep": b"[" * 5000,
    "deep object": b'{"a":' * 5000,
    "nul": b"\x00\x00",
}


def fed(data: bytes, cuts: list[int], **limits: int) -> tuple[list[dict[str, Any]], Peer]:
    """Everything a new peer makes of ``data``, cut at ``cuts``."""
    peer = Peer(**limits)
    got: list[dict[str, Any]] = []
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(data)}), len(data)]
    for start, end in itertools.pairwise(edges):
        got.extend(message for message, _ in peer.feed(data[start:end]))
    got.extend(message for message, _ in peer.close())
    return got, peer


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
good_lines = st.builds(
    lambda params, crlf: json.dumps({"jsonrpc": "2.0", "method": "x", "params": params}).encode() + crlf,
    json_values,
    st.sampled_from([b"", b"\r", b" "]),
)
bad_lines = st.sampled_from([*NOISE.values(), b"", b"\r", b"   ", b"\xef\xbb\xbf"]) | st.binary(max_size=30).map(
    lambda raw: raw.replace(b"\n", b"")
)


@settings(max_examples=150)
@given(
    st.lists(good_lines | bad_lines, max_size=12),
    st.lists(st.integers(0, 4000), max_size=12),
    st.booleans(),
)
def test_any_cut_gives_the_same_messages(lines: list[bytes], cuts: list[int], ended: bool) -> None:
    """Case E4: and the same diagnostics, whether the stream comes whole, cut anywhere, or byte by byte."""
    data = b"\n".join(lines) + (b"\n" if ended else b"")
    limits = {"max_line_bytes": 90, "max_bad_lines": 6}
    whole, one = fed(data, [], **limits)
    for where in (cuts, list(range(len(data)))):
        got, other = fed(data, where, **limits)
        assert got == whole
        assert other.failure == one.failure
        assert other.noise.sample() == one.noise.sample()
        assert vars(other.noise).items() >= {"count": one.noise.count, "blank": one.noise.blank}.items()


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_noise_between_frames_costs_nothing(noise: bytes) -> None:
    """Case E4."""
    data = noise + b"\n" + line(text_update("a")) + noise + b"\n\n" + line(text_update("b")) + noise
    got, peer = fed(data, [])
    assert got == [text_update("a"), text_update("b")]
    assert peer.noise.count == 3
    assert peer.noise.blank == 1
    assert peer.failure is None
    assert peer.noise.sample()[0] == noise[:1024].decode("utf-8", "replace")


@pytest.mark.parametrize(
    "raw",
    [
        b"\xef\xbb\xbf" + line(text_update("a")),
        line(text_update("a"))[:-1] + b"\r\n",
        b"  " + line(text_update("a")),
        line(text_update("a"))[:-1],
    ],
    ids=["byte order mark", "crlf", "indented", "no newline at the end"],
)
def test_frames_in_odd_clothes_are_frames(raw: bytes) -> None:
    """Case E4."""
    got, peer = fed(raw, [])
    assert got == [text_update("a")]
    assert peer.noise.count == 0


def test_the_strict_parser_refuses_lone_surrogates_and_ours_replaces_them() -> None:
    raw = line(text_update("MARK")).replace(b"MARK", b"a\\ud800b\\udc00")
    with pytest.raises(ValueError, match="surrogate"):
        orjson.loads(raw)
    assert fed(raw, [])[0] == [text_update("a\ufffdb\ufffd")]


def test_a_pair_of_surrogates_is_a_character() -> None:
    raw = line(text_update("MARK")).replace(b"MARK", b"\\ud83d\\ude00")
    assert fed(raw, [])[0] == [text_update("\U0001f600")]


def test_bad_utf8_inside_a_string_spares_the_frame() -> None:
    raw = line(text_update("MARK")).replace(b"MARK", b"a\xff\xc3b")
    assert fed(raw, [])[0] == [text_update("a\ufffd\ufffdb")]


@pytest.mark.parametrize(
    ("escaped", "text", "altered"),
    [
        (b"a\\u0000b", "a\ufffdb", 1),
        (b"\\u0000\\u0000", "\ufffd\ufffd", 1),
        (b"a\\\\u0000b", "a\\u0000b", 0),
        (b"a\\\\\\u0000b", "a\\\ufffdb", 1),
        (b"\\ud800\\u0000", "\ufffd\ufffd", 1),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(400))], ids=["whole", "bytes"])
def test_nul_in_an_update_is_replaced_and_counted(escaped: bytes, text: str, altered: int, cuts: list[int]) -> None:
    got, peer = fed(line(text_update("MARK")).replace(b"MARK", escaped), cuts)
    assert got == [text_update(text)]
    assert peer.noise.altered == altered


def test_nul_in_a_request_stays_for_its_values_are_echoed() -> None:
    got, _ = fed(b'{"id":"a\\u0000","method":"session/request_permission"}\n', [])
    assert got[0]["id"] == "a\0"


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, MIB, 20 * MIB])
@pytest.mark.parametrize("chunk", [1000, 65_536, 64 * MIB])
def test_long_lines(size: int, chunk: int) -> None:
    """Case E1."""
    if chunk == 1000 and size > MIB:
        chunk = 10_000
    frame = text_update("")
    frame["params"]["update"]["content"]["text"] = "x" * (size - len(line(frame)) + 1)
    raw = line(frame)
    assert len(raw) == size + 1
    data = raw + line(text_update("behind"))
    got, peer = fed(data, list(range(chunk, len(data), chunk)))
    assert got == [frame, text_update("behind")]
    assert peer.noise.count == 0


@pytest.mark.parametrize(("over", "kept"), [(-1, True), (0, True), (1, False)])
@pytest.mark.parametrize("chunk", [7, 10_000])
def test_the_cap_is_exact(over: int, kept: bool, chunk: int) -> None:
    """Case E1: the line above the cap is dropped exactly, and the connection goes on."""
    frame = text_update("x" * 1000)
    size = len(line(frame)) - 1
    data = line(text_update("before")) + line(frame) + line(text_update("behind"))
    got, peer = fed(data, list(range(chunk, len(data), chunk)), max_line_bytes=size - over)
    assert got[0] == text_update("before")
    assert got[-1] == text_update("behind")
    assert (got[1] == frame) is kept
    assert peer.noise.oversized == (0 if kept else 1)
    assert peer.failure is None


BIG = "x" * 400


@pytest.mark.parametrize(
    ("frame", "stand_in"),
    [
        ({"jsonrpc": "2.0", "id": 7, "result": {"text": BIG}}, (7, "error")),
        ({"jsonrpc": "2.0", "result": {"text": BIG}, "id": 7}, (7, "error")),
        ({"id": "7", "jsonrpc": "2.0", "error": {"code": 1, "message": BIG}}, ("7", "error")),
        ({"jsonrpc": "2.0", "id": 0, "method": "session/request_permission", "params": {"x": BIG}}, (0, "params")),
        ({"jsonrpc": "2.0", "method": "fs/read", "params": {"x": BIG}, "id": "u-u"}, ("u-u", "params")),
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(600))], ids=["whole", "bytes"])
def test_who_waits_for_an_oversized_line_gets_a_stand_in(
    frame: dict[str, Any], stand_in: tuple[Any, str], cuts: list[int]
) -> None:
    """Case E1: that frame fails, and only it."""
    got, peer = fed(line(frame), cuts, max_line_bytes=300)
    assert len(got) == 1
    assert got[0]["id"] == stand_in[0]
    assert stand_in[1] in got[0]
    assert got[0].get("method") == frame.get("method")
    assert BIG not in json.dumps(got)
    assert (peer.noise.oversized, peer.noise.count, peer.noise.consecutive) == (1, 1, 0)


def test_an_oversized_update_leaves_a_mark_in_its_session() -> None:
    """Case E1."""
    got, _ = fed(line(text_update(BIG, "s\u00e9ss")), [], max_line_bytes=300)
    size = len(line(text_update(BIG, "s\u00e9ss"))) - 1
    assert got == [
        {
            "method": "session/update",
            "params": {"sessionId": "s\u00e9ss", "update": {"sessionUpdate": "oversized_line", "bytes": size}},
        }
    ]


@pytest.mark.parametrize(
    "raw",
    [
        b"x" * 400,
        b'{"result":{"id":7,"x":"' + b"x" * 400 + b'"}}',
        b'{"result":"' + b"x" * 400 + b'\\",\\"id\\":7}"}',
        b'["id",7,"' + b"x" * 400 + b'"]',
        b'{"jsonrpc":"2.0","id":{"a":"' + b"x" * 400 + b'"}}',
    ],
)
def test_an_oversized_line_that_tells_nothing_is_noise(raw: bytes) -> None:
    got, peer = fed(raw + b"\n" + line(text_update("b")), [], max_line_bytes=300)
    assert got == [text_update("b")]
    assert (peer.noise.oversized, peer.noise.count) == (1, 1)


def test_a_flood_without_an_end_is_bounded_and_ends_the_connection() -> None:
    """Case E3."""
    cap = 256 * 1024
    peer = Peer(cap)
    peer.feed(line(text_update("before")))
    chunk = b"x" * 65_536
    tracemalloc.start()
    try:
        sent = 0
        while peer.failure is None and sent < 100 * MIB:
            assert peer.feed(chunk) == []
            sent += len(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent == FLOOD_FACTOR * cap + len(chunk)
    assert peak < 3 * cap
    assert peer.failure is not None and str(FLOOD_FACTOR * cap) in peer.failure
    assert peer.feed(b"\n" + line(text_update("late"))) == []


def test_tiny_chunks_of_one_line_take_no_more_than_the_line() -> None:
    """Case E3: neither memory nor time grows with the number of chunks."""
    peer = Peer(MIB)
    tracemalloc.start()
    try:
        for _ in range(80_000):
            peer.feed(b"xyz")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB


def test_too_many_bad_lines_in_a_row_end_the_connection() -> None:
    """Case E4: with the last lines as the reason."""
    peer = Peer()
    got = peer.feed(b"".join(b"line %d\n" % n for n in range(BAD_LINES - 1)))
    assert (got, peer.failure) == ([], None)
    assert peer.feed(b"last words\n" + line(text_update("late"))) == []
    assert peer.failure == f"It wrote {BAD_LINES} lines in a row that are no messages."
    assert peer.noise.last() == [*(f"line {n}" for n in range(BAD_LINES - 5, BAD_LINES - 1)), "last words"]


def test_a_message_between_bad_lines_starts_the_count_again() -> None:
    """Case E4."""
    peer = Peer()
    for _ in range(3):
        peer.feed(b"noise\n" * (BAD_LINES - 1) + line(text_update("a")))
    assert peer.failure is None
    assert peer.noise.count == 3 * (BAD_LINES - 1)
    assert len(peer.noise.sample()) == 10


def test_blank_lines_are_no_fault() -> None:
    """Case E4: an agent may ping with them for ever."""
    peer = Peer()
    peer.feed(b"\r\n" * (2 * BAD_LINES))
    assert peer.failure is None
    assert peer.noise.blank == 2 * BAD_LINES


@pytest.mark.parametrize(
    ("given_id", "ours"),
    [(5, 5), ("5", 5), (5.0, 5), (0, 0), (True, None), (None, None), ("x", None), ("", None), (1.5, None), ([], None)],
)
def test_ids_of_responses_match_by_value(given_id: Any, ours: int | None) -> None:
    assert response_id({"id": given_id}) == ours


def test_frames_are_one_line_each_whatever_they_hold() -> None:
    raw = encode({"text": "a\nb\r\u2028\x00 \ud800"})
    assert raw.count(b"\n") == 1 and raw.endswith(b"\n")
    assert orjson.loads(raw) == {"text": "a\nb\r\u2028\x00 \ufffd"}


def test_request_ids_grow_from_one() -> None:
    peer = Peer()
    assert [peer.request("x", {})[0] for _ in range(3)] == [1, 2, 3]
