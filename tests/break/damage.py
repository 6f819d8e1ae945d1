"""Ways to damage a file or a directory: by the bit, by the block, by its structure, by putting something else in its place."""

import hashlib
import json
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from tests.helpers.directories import content, put_odd, sign

from geodl.core.content import json_file, signed
from geodl.core.tensors import tensor_file

HEADS = ("head.json", "head-copy.json")
RAW = "@raw@"
# What may stand where something else is expected, as text: some of it is no JSON.
VALUES = [
    *"null true -1 0 1 2 1e308 NaN -Infinity 1e999 nul ' [] {} [[[]]] [1,]".split(),
    *('""', '"x"', '"../../outside"', r'"\ud800"', r'"\u0000\u001b[31m"', '"\n"'),
    *("9" * 30, "9" * 5000, '"' + "y" * 100_000 + '"', "[" * 900 + "]" * 900),
    *("[" * 100_000, '{"a":' * 100_000, '{"a": {"b": []}}', '{"a": 1, "a": 2}', "", "1 2"),
]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return the content of all files in a folder by their names; None: a folder, or no regular file."""
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


def restore(files: Mapping[str, bytes | None], folder: Path) -> None:
    """Write what a snapshot holds."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def objects(path: Path, suffix: str) -> list[str]:
    """Return where the files of phases with a suffix are, those of the last phases last."""
    head = content(path / "head.json")
    found = []
    for phase in [*head["undone"], *head["phases"]]:
        files = sorted(phase["files"].items())
        found += [f"objects/{digest}" for name, (digest, _) in files if name.endswith(suffix)]
    return found


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
    if not isinstance(value, dict | list):
        return []
    keys = value if isinstance(value, dict) else range(len(value))
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


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
        put_signed(path, data)
        return True
    with suppress(ValueError, TypeError, RecursionError):
        path.write_bytes(json_file(signed(json.loads(data))))
        return True
    path.write_bytes(data[:-1] + f', "sha256": "{checksum}"}}'.encode())
    return True


def put_signed(path: Path, data: bytes) -> None:
    """Replace an object by another one, with sound checksums, in all phases that name it."""
    digest, root = hashlib.sha256(data).hexdigest(), path.parents[1]
    path.with_name(digest).write_bytes(data)
    for name in HEADS:
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
        put_signed(path, data)
        return True
    path.write_bytes(data)
    return False


def replace(draw: random.Random, path: Path, outside: Path) -> None:
    """Put something else in the place of a file or folder, which goes `outside`: nothing there may change."""
    was_folder = path.is_dir()
    if not os.path.lexists(path):  # a model that no training was interrupted in has no progress
        path.mkdir()
    path.rename(outside / path.name)
    links = ["nothing", path.name, "/dev/zero", "/dev/tty", str(outside / path.name)]
    others = ["file", "empty"] if was_folder else ["folder", "full folder", "huge"]
    kind = draw.choice(["pipe", "socket", *links, *others])
    if kind == "huge":
        path.write_bytes((outside / path.name).read_bytes())
        os.truncate(path, 2**40)
    elif kind in ("file", "empty"):
        path.write_bytes(b"" if kind == "empty" else b"something else")
    else:
        put_odd(path, kind.removeprefix("full "))
        if kind == "full folder":
            (path / "notes.txt").write_text("mine")


def other_tensors(draw: random.Random, path: Path) -> None:
    """Give one tensor of a real file another shape, type or content, or leave it out, with sound checksums."""
    tensors = load(path.read_bytes())
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    kinds = [
        tensor[:0] if tensor.ndim else tensor.reshape(1),
        tensor.flatten(),
        tensor.unsqueeze(0),
        torch.cat([tensor, tensor]) if tensor.ndim else tensor + 1,
        tensor.to(draw.choice([torch.float64, torch.int64, torch.uint8, torch.bool])),
        torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 99),
        -tensor if tensor.dtype is not torch.bool else ~tensor,
        None,
    ]
    other = draw.choice(kinds)
    if other is not None:
        tensors[name] = other.contiguous()
    put_signed(path, tensor_file(tensors))


def harm(draw: random.Random, path: Path, outside: Path) -> bool:
    """Damage a directory; return whether its checksums are sound, so that any answer is right."""
    outside.mkdir()
    names = sorted(name for name, data in snapshot(path).items() if data)
    plain, tensors = (objects(path, suffix)[-2:] for suffix in (".json", ".safetensors"))
    if draw.random() < 0.7:  # most often where it matters: in the last state
        names = [*HEADS, *plain, *tensors]
    how = draw.randrange(6)
    if how == 0:
        return odd_json(draw, path / draw.choice([*HEADS, *plain]))
    if how == 1:
        return odd_tensors(draw, path / draw.choice(tensors))
    if how == 2:
        other_tensors(draw, path / draw.choice(tensors))
        return True
    if how == 3:
        replace(draw, path / draw.choice([*names, "objects", "progress"]), outside)
    else:
        (flip if how == 4 else tear)(draw, path / draw.choice(names))
    return False
