"""The typed line: keys in, and what stays on it."""

from __future__ import annotations

import pytest

from runner.cli.typing_line import Abort, Left, Line, Screen, Sent


def test_keys_change_the_end_of_the_line_and_enter_sends_it() -> None:
    line = Line()
    assert line.feed(b"helo") == []
    assert line.feed(b"\x7flo\r") == [Sent("hello")]
    assert line.text == ""
    assert line.feed(b"one\rtwo\nthree") == [Sent("one"), Sent("two")]
    assert line.text == "three"
    line.feed(b"\x15  ")
    assert line.feed(b"\r") == [], "nothing but blanks is no message"


def test_letters_that_arrive_in_parts_are_whole() -> None:
    line = Line()
    for byte in "grüß".encode():
        line.feed(bytes([byte]))
    assert line.text == "grüß"


def test_esc_is_told_from_the_keys_that_begin_with_it() -> None:
    line = Line()
    line.feed(b"kept")
    assert line.feed(b"\x1b") == [Abort()]
    assert line.feed(b"\x1b[A\x1bOP\x1b[3~!") == []
    assert line.text == "kept!", "what was typed stays"


def test_ctrl_d_leaves_only_from_an_empty_line() -> None:
    line = Line()
    assert line.feed(b"\x04") == [Left()]
    line.feed(b"x")
    assert line.feed(b"\x04") == []
    assert line.feed(b"") == [Left()]


@pytest.mark.parametrize(("typed", "then"), [("", "hello"), ("more", "hello more")])
def test_a_message_that_was_not_sent_stands_on_the_line_again(typed: str, then: str) -> None:
    line = Line()
    line.feed(typed.encode())
    line.give_back("hello")
    assert line.text == then


def test_text_is_shown_in_whole_lines_above_the_typed_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = Line()
    line.feed(b"typed")
    screen = Screen(line, terminal=True)
    screen.status = "[1 waiting] "
    screen.text("half")
    assert capsys.readouterr() == ("", "")
    screen.text(" a line\nand")
    out, err = capsys.readouterr()
    assert out == "half a line\n"
    assert err.endswith("\r\x1b[K[1 waiting] > typed")
    screen.say("a note\x1b[31m")
    out, err = capsys.readouterr()
    assert out == "and\n", "an open line ends first"
    assert "a note[31m\n" in err


def test_without_a_terminal_nothing_is_redrawn(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(Line(), terminal=False)
    screen.text("a line\n")
    screen.say("a note")
    assert capsys.readouterr() == ("a line\n", "a note\n")


def test_a_long_paragraph_is_seen_while_it_comes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    screen = Screen(Line(), terminal=True)
    screen.text("one two three ")
    screen.text("x" * 12)
    assert capsys.readouterr().out == "one two\nthree\nxxxxxxxxxx\n"
    screen.flush()
    assert capsys.readouterr().out == "xx\n"
