"""What strangers hand over: pictures of other formats, links, models, weights; and a server under real connections."""

import io
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.helpers.serving import HALF, Client, connected, running

from geodl.app.classifier import IncrementalClassifier
from geodl.app.serve.limits import Limits
from geodl.data.decoding import FORMATS, Reference, open_image
from geodl.data.images import FileImages, from_tensors, to_tensors
from geodl.learning.cache import Cache
from geodl.nets import build_network

from . import damage
from .harness import Refused, attempt, family

PROGRAMS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    b"%PDF-1.4\n",
    b"\xc5\xd0\xd3\xc6",
)
OTHERS = ("EPS", "PDF", "ICO", "TGA", "PCX", "SGI", "MSP", "XBM", "SPIDER", "DDS", "ICNS")


@cache
def _picture(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    mode = {"MSP": "1", "XBM": "1", "SPIDER": "F"}.get(kind, "RGB")
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, format=kind)
    return buffer.getvalue()


@family("formats")
def formats(draw: random.Random, folder: Path) -> None:
    """Pictures of formats that are not on the list, whole or damaged: refused, and no program is started."""
    file = folder / f"odd.{draw.choice(['png', 'jpg', 'eps', 'tif'])}"
    file.write_bytes(draw.choice(PROGRAMS) + draw.randbytes(draw.randint(0, 200)))
    if draw.random() < 0.6:
        file.write_bytes(_picture(draw.choice(OTHERS)))
    if draw.random() < 0.3:
        damage.tear(draw, file)
    refused = AssertionError("a program was started")
    with mock.patch.object(subprocess, "Popen", side_effect=refused):
        found = attempt(lambda: open_image(file))
    assert isinstance(found, Refused), f"read, though not one of {FORMATS}"


@family("links")
def links(draw: random.Random, folder: Path) -> None:
    """A link in the place of a folder of the cache: nothing behind it is read, written or removed."""
    outside, cache_folder = folder / "outside", folder / "cache"
    outside.mkdir()
    for name in ("k" * 64, f"{'0' * 64}.safetensors", ".geodl-tmp-x"):
        (outside / name).write_bytes(draw.randbytes(draw.randint(0, 99)))
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    cache_folder.mkdir(mode=0o700)
    where = draw.choice(["entries", "entries", "link"])
    (cache_folder / where).symlink_to(outside)
    held = Cache(cache_folder if where == "entries" else cache_folder / where / "below")
    tensors = {"a": torch.zeros(draw.randint(1, 9))}
    for action in draw.sample(["put", "load", "clear"], 3):
        if action == "put":
            attempt(lambda: held.put("0" * 64, tensors))
        elif action == "load":
            attempt(lambda: held.load("0" * 64))
        else:
            attempt(held.clear)
    found = {path.name: path.read_bytes() for path in outside.iterdir() if path.is_file()}
    assert found == before, "a write behind a link"


@family("stranger's models")
def strangers_models(draw: random.Random, folder: Path) -> None:
    """Stored images that are references to pipes, devices and private files: never opened, one line."""
    private, data = folder / "private.png", folder / "data"
    private.write_bytes(_picture("PNG"))
    data.mkdir()
    os.mkfifo(folder / "pipe")
    os.mkfifo(data / "pipe")
    paths = ["/dev/zero", "/dev/stdin", "/proc/self/environ", folder / "pipe", data / "pipe"]
    paths += [private, data / ".." / "private.png", folder / "nowhere", data, Path("private.png")]
    digest = draw.randbytes(32)
    items = tuple(Reference(Path(path), digest) for path in draw.choices(paths, k=3))
    tensors = to_tensors(FileImages(items, torch.zeros(3, dtype=torch.int64)))
    found = attempt(lambda: from_tensors(tensors, draw.choice([None, data])))
    if isinstance(found, Refused):
        return
    for i in range(3):
        assert isinstance(attempt(lambda i=i: found.decode(i)), Refused), f"read: {items[i]}"


@family("weights")
def weights(draw: random.Random, folder: Path) -> None:
    """Weights of another network, damaged or with odd values: refused in one line; those that fit are loaded."""
    own = draw.choice(["resnet8", "resnet20"])
    other = draw.choice(["resnet8", "resnet20", "convnet"])
    tensors = dict(_weights(other))
    how = draw.choice(["whole", "values", "shape", "less", "torn", "pipe"])
    name = draw.choice([key for key in sorted(tensors) if not key.endswith("tracked")])
    if how == "values":
        value = draw.choice([torch.nan, torch.inf])
        tensors[name] = torch.full_like(tensors[name], value)
    elif how == "shape":
        tensors[name] = tensors[name].flatten()[:1].clone()
    elif how == "less":
        del tensors[name]
    file = folder / f"w{draw.choice(['.safetensors', '.pth'])}"
    if how == "pipe":
        os.mkfifo(file)
    else:
        (save_file if file.suffix == ".safetensors" else torch.save)(tensors, file)
    if how == "torn":
        os.truncate(file, draw.randrange(file.stat().st_size))
    found = attempt(lambda: build_network(own, 2, head="cosine", weights=file))
    right = how == "whole" and own == other
    assert isinstance(found, Refused) != right, f"{how}: {other} into {own}: {found}"


@cache
def _weights(name: str) -> dict[str, torch.Tensor]:
    state = build_network(name, 2, head="cosine").backbone.state_dict()
    return {
        key: value.contiguous().clone(memory_format=torch.contiguous_format)
        for key, value in state.items()
    }


# -------------------------------------------------------------------------------------------------------- the server

HOSTILE = (
    b"GET /api/v1/model HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /api/v1/undo HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999999999\r\n\r\n",
    b"POST /api/v1/learn HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    b"GET / HTTP/9.9\r\n\r\n",
    HALF,
)


@contextmanager
def _serving(folder: Path) -> Iterator[str]:
    x = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    quick: dict[str, Any] = {"network": "convnet", "method": "finetune", "epochs": 1, "threads": 1}
    IncrementalClassifier(folder / "model").learn(x, ["a", "b"] * 6, **quick)
    with running(folder / "model", limits=Limits(connections=24, requests=(8, 4))) as url:
        yield url


@family("server", most=20, sockets=100)
def server(draw: random.Random, folder: Path, sockets: int = 40) -> None:
    """Real connections that are half open, torn or garbage: the owner is answered, and no answer is a 500."""
    with _serving(folder) as url, ExitStack() as held, Client(url) as owner:
        for _ in range(sockets):
            connection: socket.socket = held.enter_context(connected(url, _hostile(draw)))
            if draw.random() < 0.3:
                connection.close()
        answer = owner.predict(_picture("PNG"))
        assert answer.status_code == 200, answer.text
        assert owner.get("/api/v1/model").status_code == 200


def _hostile(draw: random.Random) -> bytes:
    content = draw.choice(HOSTILE)
    if draw.random() < 0.3:
        return content[: draw.randint(1, len(content))]
    return content + draw.randbytes(draw.choice([0, 0, 50]))
