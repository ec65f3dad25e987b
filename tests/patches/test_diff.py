"""Reading unified diffs and editing lines by them, on text of the tests' own."""

from __future__ import annotations

import difflib
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_digen import patching

HEADER = "Subject: s\nVerl-Version: 0.9.1\nWhy: w\n w2\nUpstream: u\n\n"
DIFF = "--- a/verl/x.py\n+++ b/verl/x.py\n@@ -1,3 +1,3 @@\n one\n-two\n+zwei\n three\n"

# Few letters make repeated lines likely; \r, \f and \x85 must not end a line.
texts = st.lists(st.text(alphabet="ab\r\f\x85é", max_size=2), max_size=12).map(
    lambda lines: "\n".join(["begin", *lines])
)


def diff(old: str, new: str) -> str:
    """What ``diff -u`` prints, the marker of a missing last line feed included."""
    lines = difflib.unified_diff(
        patching.split_lines(old), patching.split_lines(new), "a/verl/x.py", "b/verl/x.py", lineterm="\n"
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


@given(texts, texts)
def test_apply_gives_the_new_text_and_revert_the_old_one(old, new):
    if old == new:
        return
    (file,) = patching.parse_diff(diff(old, new), "p")
    changed = patching.edit(patching.split_lines(old), file.hunks)
    assert "".join(changed) == new
    assert "".join(patching.edit(changed, file.hunks, reverse=True)) == old


@given(st.text(alphabet="ab\n\r\f\x85"))
def test_split_lines_loses_nothing(text):
    lines = patching.split_lines(text)
    assert "".join(lines) == text
    assert all(line.endswith("\n") for line in lines[:-1])
    assert all("\n" not in line[:-1] and line for line in lines)


@pytest.mark.skipif(shutil.which("git") is None, reason="compares with git apply")
def test_same_result_as_git(tmp_path):
    old = "".join(f"{i}\n" for i in range(40))
    new = old.replace("3\n", "3a\n3b\n", 1).replace("20\n", "").replace("39\n", "39")
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl/x.py").write_text(old)
    (tmp_path / "x.patch").write_text(HEADER + diff(old, new))
    subprocess.run(["git", "apply", "x.patch"], cwd=tmp_path, check=True)
    (file,) = patching.parse_patch("x", (tmp_path / "x.patch").read_text()).files
    assert len(file.hunks) == 3
    assert "".join(patching.edit(patching.split_lines(old), file.hunks)) == (tmp_path / "verl/x.py").read_text() == new


def test_a_hunk_moves_only_to_the_one_place_where_all_its_lines_stand():
    (file,) = patching.parse_diff(DIFF, "p")
    block = ["one\n", "two\n", "three\n"]
    assert patching.edit(["0\n", *block], file.hunks) == ["0\n", "one\n", "zwei\n", "three\n"]
    assert patching.edit([*block, *block], file.hunks)[1] == "zwei\n", "the line that the diff names decides"
    for lines in (["0\n", *block, *block], ["one\n", "two\n", "3\n"], ["one\n", "two\n"], []):
        with pytest.raises(patching.PatchError, match=r"hunk 1 \(line 1\)"):
            patching.edit(lines, file.hunks)


def test_hunks_must_stand_in_their_order():
    two = DIFF + "@@ -11,2 +11,2 @@\n four\n-five\n+fünf\n"
    (file,) = patching.parse_diff(two, "p")
    good = ["x\n", "one\n", "two\n", "three\n", "four\n", "five\n"]
    assert patching.edit(good, file.hunks) == ["x\n", "one\n", "zwei\n", "three\n", "four\n", "fünf\n"]
    with pytest.raises(patching.PatchError, match="hunk 2"):
        patching.edit(["x\n", "four\n", "five\n", "one\n", "two\n", "three\n"], file.hunks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DIFF, "header fields missing: Subject, Verl-Version, Why, Upstream"),
        (HEADER.replace("Why: w\n w2\n", "") + DIFF, "header fields missing: Why"),
        (HEADER, "changes no file"),
        (HEADER + DIFF.replace("-1,3", "-1,4"), r"promises 4 old and 3 new lines, the hunk has 3 and 3"),
        (HEADER + DIFF + " a line too many\n", r"expected '--- a/…'"),
        (HEADER + DIFF.replace("@@ -1,3 +1,3 @@", "@@ here @@"), "malformed hunk header"),
        (HEADER + DIFF.split("@@")[0], "no hunk for verl/x.py"),
        (HEADER + DIFF + DIFF, "verl/x.py is named twice"),
        (HEADER + DIFF.replace("a/verl/x.py", "/dev/null"), "only changes to a file in place"),
        (HEADER + DIFF.replace("a/verl/x.py", "a/verl/y.py"), "only changes to a file in place"),
        (HEADER + DIFF.replace("verl/x.py", "other/x.py"), "outside verl/"),
        (HEADER + DIFF.replace("verl/x.py", "verl/../other/x.py"), "outside verl/"),
        (HEADER + "--- a/verl/x.py\n+++ b/verl/x.py\n@@ -1,0 +2,1 @@\n+new\n", "without context"),
    ],
)
def test_malformed_patches_are_refused(text, message):
    with pytest.raises(patching.PatchError, match=message) as caught:
        patching.parse_patch("some-name", text)
    assert "some-name" in str(caught.value)


def test_header_fields_are_unfolded():
    patch = patching.parse_patch("n", HEADER + DIFF)
    assert (patch.subject, patch.verl_version, patch.why, patch.upstream) == ("s", "0.9.1", "w w2", "u")
