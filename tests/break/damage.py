"""Ways to damage a file: by the bit, by the block, by its structure, by putting something else in its place."""

import hashlib
import json
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tests.helpers.directories import content, put_odd, sign

from geodl.core.content import json_file, signed
from geodl.core.tensors import tensor_file

RAW = "@raw@"
# What may stand where something else is expected, as text: some of it is no JSON.
VALUES = [
    *[
        "null",
        "true",
        "-1",
        "0",
        "1",
        "2",
        "1e308",
        '""',
        '"x"',
        '"../../outside"',
        "[]",
        "{}",
        "[[[]]]",
        '{"a": {"b": []}}',
    ],
    *[
        "NaN",
        "-Infinity",
        "1e999",
        "9" * 30,
        "9" * 5000,
        r'"\ud800"',
        r'"\u0000\u001b[31m"',
        '"' + "y" * 100_000 + '"',
    ],
    *[
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 900 + "]" * 900,
        "",
        "nul",
        "'",
        '"\n"',
        "1 2",
        "[1,]",
        '{"a": 1, "a": 2}',
    ],
]


def flip(draw: random.Random, path: Path) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def tear(draw: random.Random, path: Path) -> None:
    """Cut, blank, repeat, exchange or add a block, as broken disks and programs do."""
    data = path.read_bytes()
    i, j = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
    kinds = [
        data[:i],
        data[i:],
        b"",
        data[:i] + bytes(j - i) + data[j:],
        data[:i] + data[j:],
        data[:j] + data[i:],
        data + data,
        data + bytes(draw.randint(1, 5000)),
        data[:i] + draw.randbytes(draw.randint(1, 50)) + data[i:],
        data[:i] + draw.randbytes(j - i) + data[j:],
        draw.randbytes(len(data)),
    ]
    path.write_bytes(draw.choice(kinds))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """List every (container, key) below a JSON value."""
    inside = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [place for key, entry in inside for place in [(value, key), *_places(entry)]]


def mutate_json(draw: random.Random, value: Any) -> bytes:
    """Return JSON, or nearly so, in which something has another type, name or place, or is missing."""
    value = json.loads(json.dumps(value))
    raw = draw.choice(VALUES)
    places = _places(value)
    if not places or draw.random() < 0.1:
        return raw.encode()
    container, key = draw.choice(places)
    what = draw.randrange(5)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(key, str):
        container[draw.choice(["x", "", "sha256", "format", key.upper(), f"{key} "])] = (
            container.pop(key)
        )
    elif what == 2:
        other, name = draw.choice(places)
        container[key], other[name] = other[name], container[key]
    else:
        container[key] = RAW
    with suppress(ValueError):  # a value that was moved into itself
        text = json.dumps(value, ensure_ascii=False).replace(f'"{RAW}"', raw)
        encodings = ["utf-8"] * 8 + ["utf-8-sig", "utf-16", "latin-1"]
        return text.encode(draw.choice(encodings), "surrogatepass" if text.isascii() else "replace")
    return raw.encode()


def odd_json(draw: random.Random, path: Path) -> bool:
    """Put odd JSON into a file of a directory; return whether its checksums are sound, so that any answer is right."""
    value = json.loads(path.read_bytes())
    checksum = value.pop("sha256", None)
    data = mutate_json(draw, value)
    if draw.random() < 0.5:
        path.write_bytes(data)
        return False
    if path.parent.name == "objects":
        put_anew(path, data)
        return True
    with suppress(ValueError, TypeError, RecursionError):
        path.write_bytes(json_file(signed(json.loads(data))))
        return True
    path.write_bytes(data[:-1] + f', "sha256": "{checksum}"}}'.encode())
    return True


def put_anew(path: Path, data: bytes) -> None:
    """Replace an object by another one, with sound checksums, in all phases that name it."""
    digest, root = hashlib.sha256(data).hexdigest(), path.parents[1]
    path.with_name(digest).write_bytes(data)
    for name in ("head.json", "head-copy.json"):
        head = content(root / name)
        for phase in [*head["phases"], *head["undone"]]:
            for file in phase["files"].values():
                if file[0] == path.name:
                    file[:] = [digest, len(data)]
        sign(root / name, head)


def odd_events(draw: random.Random, path: Path) -> None:
    """Put odd lines between those of events.jsonl."""
    lines = path.read_bytes().split(b"\n")
    for _ in range(draw.randint(1, 4)):
        event = json.loads(draw.choice([line for line in path.read_bytes().split(b"\n") if line]))
        event.pop("crc32")
        odd = [
            draw.randbytes(20),
            mutate_json(draw, event),
            b"\r",
            b"\xe2\x80\xa8",
            b'{"time": "yesterday", "kind": "x"}',
        ]
        lines.insert(draw.randint(0, len(lines)), draw.choice(odd).replace(b"\n", b" "))
    path.write_bytes(b"\n".join(lines))


def odd_tensors(draw: random.Random, path: Path) -> bool:
    """Change the header of a safetensors file, or what is in it; return whether its checksums are sound."""
    data = path.read_bytes()
    if draw.random() < 0.3:
        names = draw.sample(
            ["weight", "pixels", "", "a.b", "__metadata__x", "\x1b[31m", "é" * 50], 3
        )
        kinds = [torch.float32, torch.uint8, torch.bool, torch.float16, torch.int64]
        sides = [0, 1, 2, 5]
        tensors = {
            name: torch.zeros(draw.choices(sides, k=draw.randint(0, 3)), dtype=draw.choice(kinds))
            for name in names
        }
        data = tensor_file(tensors)
    else:
        length = int.from_bytes(data[:8], "little")
        header = mutate_json(draw, json.loads(data[8 : 8 + length]))
        claimed = draw.choice([len(header)] * 6 + [0, 1, len(header) + 1, 2**31, 2**63, 2**64 - 1])
        data = claimed.to_bytes(8, "little") + header + data[8 + length :]
    if draw.random() < 0.7:
        put_anew(path, data)
        return True
    path.write_bytes(data)
    return False


def replace(draw: random.Random, path: Path, outside: Path) -> None:
    """Put something else in the place of a file or folder, which goes `outside`: nothing there may change."""
    was_folder = path.is_dir()
    if not os.path.lexists(path):  # a model that no training was interrupted in has no progress
        path.mkdir()
    path.rename(outside / path.name)
    kinds = [
        "pipe",
        "link to nothing",
        "link to itself",
        "link to zeros",
        "link to a terminal",
        "link outside",
        "socket",
    ]
    kinds += ["file", "empty"] if was_folder else ["folder", "full folder", "huge"]
    kind = draw.choice(kinds)
    targets = {
        "link to nothing": "nothing",
        "link to itself": path.name,
        "link to zeros": "/dev/zero",
        "link to a terminal": "/dev/tty",
        "link outside": str(outside / path.name),
    }
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        put_odd(path, kind)
    elif kind == "folder":
        path.mkdir()
    elif kind == "full folder":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    elif kind == "huge":
        path.write_bytes((outside / path.name).read_bytes())
        os.truncate(path, 2**40)
    else:
        path.write_bytes(b"" if kind == "empty" else b"something else")
