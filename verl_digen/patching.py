"""The optional patches to veRL: read, check, apply and revert unified diffs.

The plugin runs without them. Nothing is written unless ``apply`` or ``revert`` is called, and then:

- strict: a hunk goes only where the lines it removes and all of its context stand, exactly once in the file
  (or at the line the diff names); no fuzz. A diff is bound to one version of veRL.
- all or nothing: every new file content is computed before the first is written; each file is written beside
  its place and renamed into it, and what was renamed is put back if a later rename fails. A rename also
  leaves a hard-linked original (the cache of an installer) as it is.
- exact inverse: ``revert`` after ``apply`` gives the same bytes.

Imports the standard library only; veRL is located, never imported.
"""

from __future__ import annotations

import email
import enum
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HEADER_FIELDS = ("Subject", "Verl-Version", "Why", "Upstream")
VERSION_FILE = "verl/version/version"

_FILE_HEADER = re.compile(r"^--- ", re.MULTILINE)
_HUNK_HEADER = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(ValueError):
    """A patch cannot be read, or does not fit the veRL it is to be applied to."""


class State(enum.Enum):
    """How a patch stands to the files of a veRL. The value is the wording shown to the user."""

    APPLIED = "applied"
    NOT_APPLIED = "not applied"
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True)
class Hunk:
    """One replacement of lines; ``old`` and ``new`` both contain the context and are never empty."""

    old_start: int  # 1-based line of ``old`` in the released file
    new_start: int  # 1-based line of ``new`` in the file with only this patch
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FilePatch:
    path: str  # relative to the directory that holds the package, e.g. verl/__init__.py
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Patch:
    name: str
    subject: str
    verl_version: str
    why: str
    upstream: str
    files: tuple[FilePatch, ...]


@dataclass(frozen=True)
class Status:
    patch: Patch
    state: State
    reasons: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------- reading


def split_lines(text: str) -> list[str]:
    """Split after each line feed and nowhere else, so that joining gives the same text back."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def parse_diff(text: str, name: str) -> tuple[FilePatch, ...]:
    """Read the changes to existing files from a unified diff with ``a/`` and ``b/`` paths.

    Raises PatchError for anything else: new, deleted or renamed files, paths outside ``verl/``, hunks whose
    counts do not match their lines or that have no context.
    """
    lines = split_lines(text)
    files: list[FilePatch] = []
    i = 0
    while i < len(lines):
        if not lines[i].startswith("--- ") or i + 1 >= len(lines) or not lines[i + 1].startswith("+++ "):
            raise PatchError(f"patch {name}, line {i + 1}: expected '--- a/…' and '+++ b/…', found {lines[i]!r}")
        old_path, new_path = (line[4:].rstrip("\n").split("\t")[0] for line in lines[i : i + 2])
        path = new_path.removeprefix("b/")
        if old_path != f"a/{path}" or new_path != f"b/{path}":
            raise PatchError(f"patch {name}: only changes to a file in place are supported: {old_path} -> {new_path}")
        if PurePosixPath(path).parts[:1] != ("verl",) or ".." in PurePosixPath(path).parts:
            raise PatchError(f"patch {name}: {path} is outside verl/")
        if path in {file.path for file in files}:
            raise PatchError(f"patch {name}: {path} is named twice")
        i += 2
        hunks: list[Hunk] = []
        while i < len(lines) and lines[i].startswith("@@"):
            hunk, i = _parse_hunk(lines, i, name)
            hunks.append(hunk)
        if not hunks:
            raise PatchError(f"patch {name}: no hunk for {path}")
        files.append(FilePatch(path, tuple(hunks)))
    if not files:
        raise PatchError(f"patch {name}: changes no file")
    return tuple(files)


def _parse_hunk(lines: Sequence[str], i: int, name: str) -> tuple[Hunk, int]:
    """Read the hunk whose header is ``lines[i]``; returns it and the index after it."""
    header = _HUNK_HEADER.match(lines[i])
    if header is None:
        raise PatchError(f"patch {name}, line {i + 1}: malformed hunk header {lines[i]!r}")
    old_start, old_count, new_start, new_count = (int(group) if group else 1 for group in header.groups())
    sides: dict[str, list[str]] = {"-": [], "+": []}
    first, i = i, i + 1
    while i < len(lines) and (len(sides["-"]), len(sides["+"])) != (old_count, new_count):
        kind, content = lines[i][0], lines[i][1:]
        if kind not in " -+":
            break
        targets = "-+" if kind == " " else kind
        i += 1
        if i < len(lines) and lines[i].startswith("\\"):  # "\ No newline at end of file"
            content = content.removesuffix("\n")
            i += 1
        for side in targets:
            sides[side].append(content)
    counts = (len(sides["-"]), len(sides["+"]))
    if counts != (old_count, new_count):
        raise PatchError(
            f"patch {name}, hunk at line {first + 1}: the header promises {old_count} old and {new_count} new lines, "
            f"the hunk has {counts[0]} and {counts[1]}"
        )
    if 0 in counts:
        raise PatchError(f"patch {name}, hunk at line {first + 1}: a hunk without context cannot be located")
    return Hunk(old_start, new_start, tuple(sides["-"]), tuple(sides["+"])), i


def parse_patch(name: str, text: str) -> Patch:
    """Read a patch file: a header of the fields ``HEADER_FIELDS``, an empty line, a unified diff.

    Raises PatchError if a field is missing or the diff is malformed.
    """
    start = _FILE_HEADER.search(text)
    header = email.message_from_string(text[: start.start()] if start else text)
    fields = {field: " ".join((header.get(field) or "").split()) for field in HEADER_FIELDS}
    missing = [field for field, value in fields.items() if not value]
    if missing:
        raise PatchError(f"patch {name}: header fields missing: {', '.join(missing)}")
    files = parse_diff(text[start.start() :] if start else "", name)
    return Patch(name, fields["Subject"], fields["Verl-Version"], fields["Why"], fields["Upstream"], files)


def patch_folder() -> Path:
    """The folder of the patch files: inside the installed package, else at the top of the source tree.

    Raises PatchError if there is neither.
    """
    package = Path(__file__).resolve().parent
    candidates = [package / "patches"]
    if (package.parent / "setup.py").is_file():
        candidates.append(package.parent / "patches")
    for folder in candidates:
        if any(folder.glob("*.patch")):
            return folder
    raise PatchError(f"no patch files found in {' or '.join(map(str, candidates))}")


def load_patches(only: Sequence[str] = (), folder: Path | None = None) -> list[Patch]:
    """Read the patches named in ``only`` (all if empty), in alphabetical order.

    Raises PatchError for an unknown name or a malformed file.
    """
    files = {file.stem: file for file in sorted((folder or patch_folder()).glob("*.patch"))}
    unknown = sorted(set(only) - set(files))
    if unknown:
        raise PatchError(f"unknown patches {', '.join(unknown)}; available: {', '.join(files)}")
    return [
        parse_patch(name, file.read_text(encoding="utf-8")) for name, file in files.items() if not only or name in only
    ]


# ------------------------------------------------------------------------------------------ locating veRL


def find_verl(target: str | os.PathLike[str] | None = None) -> Path:
    """The directory that holds the ``verl`` package: ``target``, or that of the installed veRL, not imported.

    Raises PatchError if there is no veRL.
    """
    if target is not None:
        root = Path(target)
    else:
        spec = importlib.util.find_spec("verl")
        if spec is None or spec.origin is None:
            raise PatchError("no verl package is installed in this environment; name its directory with --target")
        root = Path(spec.origin).parent.parent
    if not (root / VERSION_FILE).is_file():
        raise PatchError(
            f"no veRL in {root}: {root / VERSION_FILE} does not exist (--target is the folder above verl/)"
        )
    return root


def verl_version(root: Path) -> str:
    """The version of the veRL in ``root``, as veRL itself reads it."""
    return (root / VERSION_FILE).read_text(encoding="utf-8").strip()


# ------------------------------------------------------------------------------------ matching and editing


def _find(lines: Sequence[str], block: tuple[str, ...], nominal: int) -> int | None:
    """Index of ``block`` in ``lines``: at ``nominal``, or where it stands exactly once; None otherwise."""

    def fits(index: int) -> bool:
        return index >= 0 and tuple(lines[index : index + len(block)]) == block

    if fits(nominal):
        return nominal
    found = [index for index in range(len(lines) - len(block) + 1) if lines[index] == block[0] and fits(index)]
    return found[0] if len(found) == 1 else None


def edit(lines: Sequence[str], hunks: Sequence[Hunk], *, reverse: bool = False) -> list[str]:
    """Replace the old lines of each hunk by the new ones (``reverse``: the other way round).

    Raises PatchError if a hunk is not found or the hunks do not stand in their order.
    """
    result = list(lines)
    places: list[tuple[int, int, tuple[str, ...]]] = []
    for number, hunk in enumerate(hunks, start=1):
        start, source, replacement = hunk.old_start, hunk.old, hunk.new
        if reverse:
            start, source, replacement = hunk.new_start, hunk.new, hunk.old
        index = _find(lines, source, start - 1)
        if index is None or (places and index < places[-1][1]):
            raise PatchError(f"hunk {number} (line {start}) does not fit")
        places.append((index, index + len(source), replacement))
    for begin, end, replacement in reversed(places):
        result[begin:end] = replacement
    return result


def _file_states(lines: Sequence[str], file: FilePatch) -> tuple[set[State], list[str]]:
    """The states of the hunks of one file, and a sentence for each hunk that has none."""
    states: set[State] = set()
    reasons: list[str] = []
    for number, hunk in enumerate(file.hunks, start=1):
        released = _find(lines, hunk.old, hunk.old_start - 1) is not None
        patched = _find(lines, hunk.new, hunk.new_start - 1) is not None
        if released != patched:
            states.add(State.APPLIED if patched else State.NOT_APPLIED)
        else:
            states.add(State.DOES_NOT_FIT)
            what = "both the released and the patched text" if released else "neither the released nor the patched text"
            reasons.append(f"{file.path}, hunk {number} (line {hunk.old_start}): the file has {what}")
    return states, reasons


def status(patch: Patch, version: str, texts: Mapping[str, str | None]) -> Status:
    """How ``patch`` stands to a veRL of ``version`` whose files are ``texts`` (None: no such file)."""
    if version != patch.verl_version:
        return Status(patch, State.DOES_NOT_FIT, (f"made for veRL {patch.verl_version}, this is veRL {version}",))
    states: set[State] = set()
    reasons: list[str] = []
    for file in patch.files:
        text = texts[file.path]
        if text is None:
            states.add(State.DOES_NOT_FIT)
            reasons.append(f"{file.path} does not exist")
            continue
        file_states, file_reasons = _file_states(split_lines(text), file)
        states |= file_states
        reasons += file_reasons
    if states == {State.APPLIED, State.NOT_APPLIED}:
        reasons.append("partly applied: some of its hunks are in, some are not")
    return Status(patch, states.pop() if len(states) == 1 else State.DOES_NOT_FIT, tuple(reasons))


def _read_texts(patches: Sequence[Patch], root: Path) -> dict[str, str | None]:
    paths = {file.path for patch in patches for file in patch.files}
    return {path: _decode((root / path).read_bytes()) if (root / path).is_file() else None for path in paths}


def _decode(content: bytes) -> str:
    """Text of a file; ``_encode`` gives the same bytes back even where they are not UTF-8."""
    return content.decode("utf-8", "surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# ------------------------------------------------------------------------------------------- the commands


def check(patches: Sequence[Patch], root: Path) -> list[Status]:
    """The status of each patch in the veRL of ``root``. Reads only."""
    texts = _read_texts(patches, root)
    version = verl_version(root)
    return [status(patch, version, texts) for patch in patches]


def apply(patches: Sequence[Patch], root: Path) -> list[Patch]:
    """Apply the patches that are not applied yet; returns those.

    Raises PatchError, before anything is written, if one of ``patches`` does not fit; OSError if the files
    cannot be written, in which case they are as before.
    """
    return _change(patches, root, reverse=False)


def revert(patches: Sequence[Patch], root: Path) -> list[Patch]:
    """Take back the patches that are applied; returns those. Raises as ``apply`` does."""
    return _change(patches, root, reverse=True)


def _change(patches: Sequence[Patch], root: Path, *, reverse: bool) -> list[Patch]:
    before = _read_texts(patches, root)
    after = dict(before)
    version = verl_version(root)
    todo = State.APPLIED if reverse else State.NOT_APPLIED
    changed: list[Patch] = []
    problems: list[str] = []
    for patch in patches:
        found = status(patch, version, after)
        if found.state is State.DOES_NOT_FIT:
            problems += [f"{patch.name}: {reason}" for reason in found.reasons]
        elif found.state is todo:
            for file in patch.files:
                after[file.path] = "".join(edit(split_lines(after[file.path] or ""), file.hunks, reverse=reverse))
            changed.append(patch)
    if problems:
        restore = f"pip install --force-reinstall --no-deps verl=={version}"
        raise PatchError(
            f"nothing was written to {root}, because these patches do not fit:\n  "
            + "\n  ".join(problems)
            + (f"\nthis restores the released files: {restore}" if version == patches[0].verl_version else "")
        )
    replace_files(
        {root / path: _encode(text) for path, text in after.items() if text is not None and text != before[path]}
    )
    return changed


def replace_files(contents: Mapping[Path, bytes]) -> None:
    """Give each existing file its new content, all or none of them, keeping the permissions.

    Raises OSError with every file as before.
    """
    originals = {path: path.read_bytes() for path in contents}
    staged: dict[Path, Path] = {}
    replaced: list[Path] = []
    try:
        for path, content in contents.items():
            staged[path] = _stage(path, content)
        for path in contents:
            os.replace(staged[path], path)
            del staged[path]
            replaced.append(path)
    except BaseException:  # an interrupt between two renames included
        for path in replaced:
            os.replace(_stage(path, originals[path]), path)
        raise
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(path: Path, content: bytes) -> Path:
    """Write ``content`` to a new file beside ``path``, with its permissions; returns the new file."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".verl-digen", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(path, temporary)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Path(temporary)
