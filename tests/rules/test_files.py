from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import RunnerError
from runner.rules.files import (
    ALWAYS,
    Precondition,
    content_type,
    decode_cursor,
    encode_cursor,
    etag_of,
    etags,
    file_names,
    folder_names,
)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a", ("a",)),
        ("a/b//./c d", ("a", "b", "c d")),
        ("./a", ("a",)),
        ("...", ("...",)),
        ("a..b/..c", ("a..b", "..c")),
        ("ü/😀\n", ("ü", "😀\n")),
        ("a\\..\\b", ("a\\..\\b",)),
    ],
)
def test_a_path_is_its_names(path: str, names: tuple[str, ...]) -> None:
    assert file_names(path) == folder_names(path) == folder_names(f"{path}/") == names


@pytest.mark.parametrize("path", ["", ".", "./"])
def test_the_workspace_itself_is_a_folder_and_no_file(path: str) -> None:
    assert folder_names(path) == ()
    with pytest.raises(RunnerError):
        file_names(path)


@pytest.mark.parametrize("path", ["/", "/a", "//a", "..", "a/..", "a\0", "x" * 1025, "ü" * 513, "d/" * 64 + "x"])
def test_what_leads_out_or_is_too_long_is_refused(path: str) -> None:
    for names in (file_names, folder_names):
        with pytest.raises(RunnerError) as refused:
            names(path)
        assert (refused.value.code, refused.value.extra["field"]) == ("invalid_request", "path")
        assert len(refused.value.message) < 300


def test_a_file_has_no_slash_at_its_end() -> None:
    with pytest.raises(RunnerError):
        file_names("a/")


@given(st.text())
def test_no_path_has_a_name_that_leads_up(path: str) -> None:
    try:
        names = folder_names(path)
    except RunnerError:
        return
    assert all(name not in ("", ".", "..") and "/" not in name and "\0" not in name for name in names)


ETAG, OTHER = etag_of(b"1"), etag_of(b"2")


@pytest.mark.parametrize(
    ("condition", "missing", "same", "other"),
    [
        (ALWAYS, True, True, True),
        (Precondition(match=("*",)), False, True, True),
        (Precondition(match=(ETAG,)), False, True, False),
        (Precondition(match=()), False, False, False),
        (Precondition(none_match=("*",)), True, False, False),
        (Precondition(none_match=(ETAG,)), True, False, True),
        (Precondition(match=(ETAG, OTHER), none_match=(OTHER,)), False, True, False),
    ],
)
def test_conditions(condition: Precondition, missing: bool, same: bool, other: bool) -> None:
    assert [condition.holds(etag) for etag in (None, ETAG, OTHER)] == [missing, same, other]
    assert condition.asks is (condition is not ALWAYS)


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, None),
        ("*", ("*",)),
        (' "a" , "b,"', None),
        ('"a"', ('"a"',)),
        ('"a", "b"', ('"a"', '"b"')),
        ('""', ('""',)),
    ],
)
def test_headers_of_conditions(header: str | None, found: tuple[str, ...] | None) -> None:
    if header is not None and found is None:
        with pytest.raises(RunnerError, match="If-Match"):
            etags(header, "If-Match")
    else:
        assert etags(header, "If-Match") == found


def test_a_weak_etag_is_enough_to_know_it_and_not_to_replace_it() -> None:
    assert etags(f"W/{ETAG}", "If-None-Match") == (ETAG,)
    match = etags(f"W/{ETAG}", "If-Match")
    assert not Precondition(match=match).holds(ETAG)


@pytest.mark.parametrize("text", ["", "!", "YQ==", "YR", "a b", "é"])
def test_a_cursor_that_is_none_of_ours_is_refused(text: str) -> None:
    with pytest.raises(RunnerError, match="cursor"):
        decode_cursor(text)


@given(st.binary(min_size=1))
def test_a_cursor_comes_back(name: bytes) -> None:
    assert decode_cursor(encode_cursor(name)) == name
    assert decode_cursor(None) == b""


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("a.txt", b"x", "text/plain; charset=utf-8"),
        ("a.TXT", b"\xff", "text/plain"),
        ("page.html", b"", "text/html; charset=utf-8"),
        ("x.json", b"{}", "application/json"),
        ("x.tar.gz", b"", "application/gzip"),
        ("Makefile", b"", "application/octet-stream"),
        ("txt", b"", "application/octet-stream"),
        ("x.exe", b"", "application/octet-stream"),
    ],
)
def test_types(name: str, data: bytes, found: str) -> None:
    assert content_type(name, data) == found
