"""Payloads: what goes in comes out, byte for byte; anything else is unreadable."""

from __future__ import annotations

import pytest

from runner.store.stream.codec import Unreadable, decode, encode, session_of
from tests.stream.bed import PROJECT, SESSION, row


@pytest.mark.parametrize("data", [b"", b'"x"', b"\n\n", b"\x00\xff\n raw", b'{"text":"\\ud800"}'])
def test_round_trip(data: bytes) -> None:
    for record in (row(1), row(1, turn=None), row(1)._replace(prompt_id=None)):
        record = record._replace(data=data)
        assert decode(encode(record)) == record
        assert session_of(encode(record)) == (PROJECT, SESSION)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"no json\n",
        b"{}\n",
        b"[1,2,3]\n",
        b'["p","s","r","t","p",1,true,"message",1]\n',
        b'["p","s","r","t",7,1,1,"message",1]\n',
        b'["p","s",null,"t","p",1,1,"message",1]\n',
        encode(row(1)).partition(b"\n")[0],
    ],
)
def test_what_we_do_not_write_is_unreadable(payload: bytes) -> None:
    with pytest.raises(Unreadable):
        decode(payload)


def test_another_version_is_unreadable() -> None:
    with pytest.raises(Unreadable):
        decode(encode(row(1)), "2")


def test_a_text_that_is_no_unicode_has_no_payload() -> None:
    with pytest.raises(Unreadable):
        encode(row(1)._replace(prompt_id="\ud800"))


@pytest.mark.parametrize("payload", [b"", b"[]\n", b"7\n", b"{}\n", b'[1,"s"]\n', b'["p"]\n'])
def test_whose_a_payload_is_may_be_unknown(payload: bytes) -> None:
    assert session_of(payload) is None
