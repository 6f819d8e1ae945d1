"""Input from strangers: pictures of other formats, models that refer to files, weights, numbers that are not finite."""

import os
import random
import subprocess
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from PIL import Image
from safetensors.torch import save_file
from tests.helpers import tiny
from tests.helpers.pictures import encode, noise

from geodl.core.content import interpreting
from geodl.core.decoding import FORMATS, Reference, open_image
from geodl.data.images import FileImages, from_tensors, to_tensors
from geodl.learning.learner import Learner
from geodl.model.model import Model
from geodl.nets import build_network

from . import damage
from .harness import Refused, attempt, family
from .models import DATA, part

PROGRAMS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    b"%PDF-1.4\n",
    b"\xc5\xd0\xd3\xc6",
)
OTHERS = ("EPS", "PDF", "ICO", "TGA", "PCX", "SGI", "MSP", "XBM", "SPIDER", "DDS", "ICNS")


@cache
def _picture(kind: str) -> bytes:
    mode = {"MSP": "1", "XBM": "1", "SPIDER": "F"}.get(kind, "RGB")
    return encode(Image.fromarray(noise(32, 32, 3)).convert(mode), kind)


def _scans(number: int) -> bytes:
    """Return a JPEG file with many scans, each of which takes as long to decode as the picture."""
    jpeg = encode(Image.new("L", (500, 500)), "JPEG", progressive=True)
    start = jpeg.index(b"\xff\xda")
    end = jpeg.index(b"\xff\xc4", start)
    return jpeg[:end] + jpeg[start:end] * number + jpeg[end:]


@family("formats")
def formats(draw: random.Random, folder: Path) -> None:
    """Pictures of formats that are not on the list, and JPEG files of very many scans: refused, and no program is started."""
    file = folder / f"odd.{draw.choice(['png', 'jpg', 'eps', 'tif'])}"
    file.write_bytes(draw.choice(PROGRAMS) + draw.randbytes(draw.randint(0, 200)))
    if draw.random() < 0.6:
        file.write_bytes(_picture(draw.choice(OTHERS)))
    if draw.random() < 0.2:
        file.write_bytes(_scans(draw.randint(101, 3000)))
    elif draw.random() < 0.3:
        damage.tear(draw, file)
    refused = AssertionError("a program was started")
    with mock.patch.object(subprocess, "Popen", side_effect=refused):
        found = attempt(lambda: open_image(file))
    assert isinstance(found, Refused), f"read, though a bomb or not one of {FORMATS}"


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


# ------------------------------------------------------------------------------------------------------------ numbers


@cache
def _learned(method: str) -> Model:
    more = {"expansion": 64} if method == "analytic" else {}
    learner = Learner(tiny.config(method=method, epochs=1, **more))
    learner.learn(*part(0, 1))
    learner.learn(*part(2))
    return learner.known


@family("numbers")
def numbers(draw: random.Random, folder: Path) -> None:
    """Weights, means or sums that overflow or are no numbers: no confidence, no accuracy, no model comes of them."""
    attempt(lambda: _numbers(draw, folder))


def _numbers(draw: random.Random, folder: Path) -> None:
    model = _learned(draw.choice(["lucir", "finetune", "analytic"]))
    tensors = {key: each.clone() for key, each in model.to_tensors().items()}
    name = draw.choice([key for key, each in tensors.items() if each.is_floating_point()])
    value = draw.choice([torch.nan, torch.inf, -torch.inf, 3e38, 1e25, 0.0])
    if draw.random() < 0.5:
        tensors[name].fill_(value)
    else:
        tensors[name].flatten()[draw.randrange(tensors[name].numel())] = value
    with interpreting(folder):
        damaged = Model.from_tensors(model.config, model.record(), tensors)
        learner = Learner(model.config, model=damaged)
    predicted = attempt(lambda: learner.predict(DATA.test.pixels))
    if not isinstance(predicted, Refused):
        inside = (predicted.probabilities >= 0) & (predicted.probabilities <= 1)
        assert inside.all(), f"{name} = {value}: confidences {predicted.probabilities.max()}"
    rows = [i for i, label in enumerate(DATA.test.labels.tolist()) if label < 3]
    truth = [f"class {DATA.test.labels[i]}" for i in rows]
    attempt(lambda: learner.evaluate(DATA.test.pixels[rows], truth))
    if isinstance(attempt(lambda: learner.learn(*part(3))), Refused):
        assert learner.model is damaged, "a step that was refused changed the model"
        return
    found = learner.known.to_tensors()
    network = {key: each for key, each in found.items() if key.startswith("network.")}
    wrong = [key for key, each in network.items() if not bool(each.isfinite().all())]
    assert not wrong, f"{name} = {value}: learned, and {wrong[0]} is not finite"
