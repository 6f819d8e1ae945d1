"""Labelled images from a zip archive of class folders or a CSV table of files and labels."""

import csv
import io
import zipfile
from pathlib import Path, PurePosixPath

from geodl.core.decoding import Item, image_problem, shown
from geodl.core.errors import DataError
from geodl.core.files import open_regular, read_file
from geodl.core.text import one_line, printable, readable
from geodl.data.dataset import insist
from geodl.data.folder import OUTSIDE, Skips
from geodl.data.images import FileImages
from geodl.data.names import numbered

LARGEST = 2 << 30
"""Maximum number of unpacked bytes of an archive, which is read into memory."""
HEADS = {"file", "filename", "image", "path"}
"""Names of the first column by which a header line is recognized."""

Row = tuple[str, Item, str]
"""The origin of an image, the image, its label."""


def read_listing(path: Path, strict: bool) -> tuple[FileImages, tuple[str, ...], Skips]:
    """Return the labelled images of a zip archive or a CSV table, the origin of each, and the skipped files."""
    try:
        rows, skipped = _archive(path) if path.suffix.lower() == ".zip" else (_table(path), [])
    except DataError:
        raise
    except Exception as error:  # each kind of compression has its own exceptions
        raise DataError(f"{shown(path)}: cannot be read ({one_line(error)})") from None

    def check() -> None:
        insist(strict, [(f"{shown(path)}: {what}", reason) for what, reason in skipped[:1]])

    check()
    good: list[Row] = []
    for name, item, label in rows:
        if reason := image_problem(item):
            skipped.append((name, reason))
            check()
        else:
            good.append((name, item, label))
    if not good:
        first = f" (first: {skipped[0][0]}: {skipped[0][1]})" if skipped else ""
        raise DataError(f"{shown(path)}: no images with labels found{first}")
    names, items, labels = zip(*good, strict=True)
    rows_of_classes, classes = numbered(labels)
    return FileImages(items, rows_of_classes, classes), names, skipped


def _archive(path: Path) -> tuple[list[Row], Skips]:
    """Read the class folders of a zip archive, which may be inside one folder; nothing is unpacked to the disk."""
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        members = []
        for info in archive.infolist():
            parts = PurePosixPath(info.filename).parts
            hidden = any(part.startswith((".", "__MACOSX")) for part in parts)
            if not info.is_dir() and not hidden:
                members.append((parts, info))
        total = sum(info.file_size for _, info in members)
        if total > LARGEST:
            limit = f"at most {readable(LARGEST)} are read"
            raise DataError(f"{shown(path)}: {readable(total)} unpacked, {limit}; unpack it")
        outer = {parts[0] for parts, _ in members if len(parts) > 1}
        deep = any(len(parts) > 2 for parts, _ in members)
        inside = (archive.read(info) for parts, info in members if len(parts) == 2)
        skip = 1 if len(outer) == 1 and deep and all(map(image_problem, inside)) else 0
        rows: list[Row] = []
        skipped: Skips = []
        for parts, info in members:
            if len(parts) > skip + 1:
                name = printable("/".join(parts[skip:]))
                rows.append((name, archive.read(info), parts[skip]))
            else:
                skipped.append((printable(info.filename), OUTSIDE))
        return rows, skipped


def _table(path: Path) -> list[Row]:
    """Read a table whose first two columns are a file (relative to the table) and its label."""
    text = read_file(path).decode("utf-8-sig")
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    table = csv.reader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
    lines = []
    for line in table:
        entries = [entry.strip() for entry in line]
        if any(entries):
            lines.append(entries)
    if lines and lines[0][0].lower() in HEADS:
        lines = lines[1:]
    rows: list[Row] = []
    for line in lines:
        if len(line) < 2:
            raise DataError(f"{shown(path)}: {printable(line[0])!r} has no label; give file,label")
        rows.append((printable(line[0]), path.parent / line[0], line[1]))
    return rows
