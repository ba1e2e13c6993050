"""Masking of known secret values, in whole texts, JSON values and streams cut anywhere (DESIGN 3.11, case K2)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.redaction import MASK, Redactor, StreamRedactor

KEY = "sk-live-12345"


def streamed(redactor: Redactor, chunks: list[str]) -> list[str]:
    stream = StreamRedactor(redactor)
    return [*map(stream.feed, chunks), stream.flush()]


def test_each_occurrence_is_masked():
    assert Redactor([KEY]).text(f"a {KEY}{KEY}\n{KEY}.") == f"a {MASK}{MASK}\n{MASK}."


def test_without_secrets_nothing_is_touched_or_copied():
    tree = {"a": [KEY]}
    assert not Redactor()
    assert Redactor().tree(tree) is tree
    assert Redactor().text(KEY) is KEY
    assert streamed(Redactor(), [KEY, "x"]) == [KEY, "x", ""]


@pytest.mark.parametrize("value", ["", "a", "12345"])
def test_a_value_that_would_blank_ordinary_words_is_not_masked(value: str):
    assert not Redactor([value])
    assert Redactor([value, KEY]).text(f"{value} {KEY}") == f"{value} {MASK}"


def test_the_longer_of_two_values_wins():
    assert Redactor(["secret", "secret-long"]).text("secret-long secret-short") == f"{MASK} {MASK}-short"


def test_a_value_is_a_text_not_a_pattern():
    assert Redactor([".*[a-z]+$"]).text("anything .*[a-z]+$ at all") == f"anything {MASK} at all"


@pytest.mark.parametrize(
    "value", ['quo"te\\back', "line\nbreak\tand tab", "pässwörd-ü", "emoji-\U0001f511-key", 'pä"ss-key']
)
def test_the_json_spellings_of_a_value_are_masked_too(value: str):
    redactor = Redactor([value])
    for text in (value, json.dumps({"key": value}), json.dumps({"key": value}, ensure_ascii=False)):
        masked = redactor.text(text)
        assert MASK in masked
        assert value not in masked
        assert json.dumps(value)[1:-1] not in masked


def test_a_tree_is_masked_in_every_string_keys_included():
    masked = Redactor([KEY]).tree({KEY: [f"x{KEY}", 1, None, True, {"deep": {KEY: KEY}}], "n": 1.5})
    assert masked == {MASK: [f"x{MASK}", 1, None, True, {"deep": {MASK: MASK}}], "n": 1.5}


def test_a_secret_split_over_chunks_is_masked_case_k2():
    assert streamed(Redactor([KEY]), ["key: sk-li", "ve-1", "2345 done"]) == ["key: ", "", f"{MASK} done", ""]


def test_what_only_looked_like_a_secret_is_shown_after_all():
    assert streamed(Redactor([KEY]), ["sk-live-1234", "6 done"]) == ["", "sk-live-12346 done", ""]
    assert streamed(Redactor([KEY]), ["see sk-li"]) == ["see ", "sk-li"]


def test_a_text_that_no_secret_begins_with_is_not_held_back():
    assert streamed(Redactor([KEY]), ["hello", " world"]) == ["hello", " world", ""]


def test_a_short_value_that_a_longer_one_begins_with_waits_for_it_case_k2():
    redactor = Redactor(["secret", "secret-long"])
    assert streamed(redactor, ["a secret", "-lo", "ng!"]) == ["a ", "", f"{MASK}!", ""]
    assert streamed(redactor, ["a secret", "-loft"]) == ["a ", f"{MASK}-loft", ""]
    assert streamed(redactor, ["a secret"]) == ["a ", MASK]


def test_a_secret_whose_end_is_its_own_beginning():
    assert streamed(Redactor(["abcabc"]), ["abcabc", "abc", "x"]) == [MASK, "", "abcx", ""]


def test_secrets_that_overlap_each_other_in_a_row():
    assert streamed(Redactor(["ababab"]), ["ababababa", "bab", "a"]) == [MASK, MASK, "", "a"]


def test_the_mask_itself_is_never_taken_for_the_beginning_of_a_secret():
    assert streamed(Redactor([KEY, "]tail-secret"]), [KEY, "tail-secret"]) == [MASK, "tail-secret", ""]


LETTERS = st.text("ab-", min_size=6, max_size=9) | st.sampled_from(["ababab", "aaaaaa", "aaaaaab", "ab-ab-ab"])


@st.composite
def spelled(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Secrets of few letters, so that they overlap, and chunks that hold them whole, cut and nearly."""
    secrets = draw(st.lists(LETTERS, min_size=1, max_size=3))
    piece = st.sampled_from(secrets) | st.text("ab-", max_size=4) | st.sampled_from([s[:-1] for s in secrets])
    text = "".join(draw(st.lists(piece, max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return secrets, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(spelled())
def test_a_stream_is_masked_as_its_whole_text_however_it_is_cut_case_k2(spelling: tuple[list[str], list[str]]):
    secrets, chunks = spelling
    redactor = Redactor(secrets)
    assert "".join(streamed(redactor, chunks)) == redactor.text("".join(chunks))


@given(spelled())
def test_no_prefix_of_a_stream_shows_a_secret_case_k2(spelling: tuple[list[str], list[str]]):
    secrets, chunks = spelling
    shown = "".join(streamed(Redactor(secrets), chunks)).split(MASK)
    assert not [part for part in shown if any(secret in part for secret in secrets)]


@given(spelled())
def test_never_more_is_held_back_than_the_beginning_of_one_secret(spelling: tuple[list[str], list[str]]):
    secrets, chunks = spelling
    redactor = Redactor(secrets)
    stream = StreamRedactor(redactor)
    raw = ""
    for chunk in chunks:
        raw += chunk
        _, rest = redactor.split(raw)
        stream.feed(chunk)
        assert not rest or any(secret.startswith(rest) and secret != rest for secret in secrets)


def test_a_tree_ends_where_json_of_ours_ends():
    """An agent may nest as deep as the parser goes; nothing of ours recurses that deep."""
    value: Any = "hunter2-secret"
    for _ in range(1000):
        value = [value]
    masked = Redactor(["hunter2-secret"]).tree(value)
    for _ in range(200):
        [masked] = masked
    assert masked == "…"
