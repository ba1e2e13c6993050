"""Patches to packages: they fit exactly or not at all."""

from __future__ import annotations

import difflib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.rules.patches import PatchRefused, applied, changed, patch_of, patches_digest, target_of

HEAD = b"--- a/dist/index.js\n+++ b/dist/index.js\n"
OLD = b"one\ntwo\nthree\nfour\nfive\n"


def table(**changes: object) -> dict[str, object]:
    members = {
        "harness": "toy",
        "package": "@scope/toy",
        "version": "1.0.0",
        "file": "toy.patch",
        "sha256": hashlib.sha256(OLD).hexdigest(),
        "reason": "a test",
    }
    return {**members, **changes}


@pytest.mark.parametrize(
    ("hunks", "after"),
    [
        (b"@@ -2 +2 @@\n-two\n+zwei\n", b"one\nzwei\nthree\nfour\nfive\n"),
        (b"@@ -1,3 +1,4 @@\n one\n two\n+and\n three\n", b"one\ntwo\nand\nthree\nfour\nfive\n"),
        (b"@@ -4,2 +4,0 @@ in a function\n-four\n-five\n", b"one\ntwo\nthree\n"),
        (b"@@ -0,0 +1 @@\n+zero\n", b"zero\n" + OLD),
        (b"@@ -1 +1 @@\n-one\n+eins\n@@ -5 +5 @@\n-five\n+fuenf\n", b"eins\ntwo\nthree\nfour\nfuenf\n"),
        (b"@@ -5 +5 @@\n-five\n+five\n\\ No newline at end of file\n", b"one\ntwo\nthree\nfour\nfive"),
    ],
)
def test_a_diff_that_fits(hunks: bytes, after: bytes) -> None:
    assert changed(HEAD + hunks, OLD) == after


@pytest.mark.parametrize(
    ("hunks", "words"),
    [
        (b"", "changes nothing"),
        (b"@@ -3 +3 @@\n-two\n+zwei\n", "line 3 is another"),
        (b"@@ -9 +9 @@\n-two\n+zwei\n", "outside the file"),
        (b"@@ -4 +4 @@\n-four\n+4\n@@ -1 +1 @@\n-one\n+1\n", "before the one above"),
        (b"@@ -1,2 +1,2 @@\n-one\n+1\n", "ends too early"),
        (b"@@ -1 +1,2 @@\n-one\n*1\n", "none of a diff"),
        (b"@@ -1,1 +1,2 @@\n-one\n-two\n+1\n+2\n", "more lines than it says"),
        (b"@@ -1 +1 @@\n-one\n+1\n--- a/b\n+++ b/b\n@@ -1 +1 @@\n-one\n+1\n", "more than one file"),
        (b"@@ -5 +5 @@\n-five\n\\ No newline at end of file\n+5\n", "line 5 is another"),
    ],
)
def test_a_diff_that_does_not_fit(hunks: bytes, words: str) -> None:
    with pytest.raises(PatchRefused, match=words):
        changed(HEAD + hunks, OLD)


@given(st.lists(st.sampled_from(["a", "b", "-- a/x", "++ b", "\\ ", ""])), st.data())
def test_whatever_a_diff_says_is_what_comes_of_it(old: list[str], data: st.DataObject) -> None:
    new = data.draw(st.lists(st.sampled_from(["a", "c", "-- a/x", "@@ -1 +1 @@"])))
    before, after = ([f"{line}\n" for line in lines] for lines in (old, new))
    context = data.draw(st.integers(0, 3))
    diff = "".join(difflib.unified_diff(before, after, "a/f", "b/f", n=context)).encode()
    if diff:
        assert changed(diff, "".join(before).encode()) == "".join(after).encode()


@pytest.mark.parametrize(
    ("diff", "words"),
    [
        (b"nothing", "names no file"),
        (b"--- /dev/null\n+++ b/new\n", "makes, removes or renames"),
        (b"--- a/../../x\n+++ b/../../x\n", "no file of the package"),
        (b"--- a/x/\n+++ b/x/\n", "no file of the package"),
        (b"--- x\n+++ x\n", "no file of the package"),
    ],
)
def test_a_diff_is_of_one_file_of_the_package(diff: bytes, words: str) -> None:
    with pytest.raises(PatchRefused, match=words):
        target_of(diff)


def test_the_file_has_to_be_the_one_that_the_patch_was_made_for() -> None:
    diff = HEAD + b"@@ -2 +2 @@\n-two\n+zwei\n"
    patch = patch_of(table(), b"diff --git a/dist/index.js b/dist/index.js\nindex 1..2 100644\n" + diff)
    assert patch.target == "node_modules/@scope/toy/dist/index.js"
    assert b"zwei" in applied(patch, OLD)
    with pytest.raises(PatchRefused, match="other content"):
        applied(patch, OLD + b"six\n")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"sha256": "x"}, "no digest"), ({"version": 1}, "no text"), ({"more": "x"}, "unknown member more")],
)
def test_a_table_of_the_manifest_is_complete_and_plain(changes: dict[str, object], words: str) -> None:
    diff = HEAD + b"@@ -2 +2 @@\n-two\n+zwei\n"
    with pytest.raises(PatchRefused, match=words):
        patch_of(table(**changes), diff)
    short = table()
    del short["reason"]
    with pytest.raises(PatchRefused, match="lacks reason"):
        patch_of(short, diff)


def test_the_digest_names_a_set() -> None:
    diff = HEAD + b"@@ -2 +2 @@\n-two\n+zwei\n"
    one, two = patch_of(table(), diff).facts(), patch_of(table(file="other.patch"), diff).facts()
    assert patches_digest([one, two]) == patches_digest([two, one])
    assert len({patches_digest(some) for some in ([], [one], [two], [one, two], [one, one])}) == 5
    assert patches_digest([one]) != patches_digest([{**one, "version": "1.0.1"}])
