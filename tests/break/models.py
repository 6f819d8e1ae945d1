"""Real models and runs, damaged, under whole commands: exit 0 with the right answer, or 2 with one line."""

import json
import random
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load
from tests.helpers import tiny
from tests.helpers.directories import cut

from geodl.app.classifier import IncrementalClassifier
from geodl.bench.experiment import run_config
from geodl.core.errors import Interrupted
from geodl.core.tensors import tensor_file

from . import damage
from .commands import geodl
from .directories import HEADS, objects
from .harness import Refused, attempt, family

QUICK: dict[str, Any] = {
    "network": "convnet",
    "epochs": 1,
    "threads": 1,
    "workers": 1,
    "precision": "32",
}
METHODS = ("lucir", "analytic")
DATA = tiny.dataset(classes=4, train=8)


def _files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def _put(files: dict[str, bytes], path: Path) -> None:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def _part(*classes: int) -> tuple[Any, list[str]]:
    rows = torch.isin(DATA.train.labels, torch.tensor(classes))
    names = [DATA.classes[label] for label in DATA.train.labels[rows].tolist()]
    return DATA.train.pixels[rows].permute(0, 2, 3, 1).numpy(), names


@cache
def model_files(method: str) -> dict[str, bytes]:
    """Return the files of a model of two steps, one of them renamed, and one that was taken back; made once."""
    with tempfile.TemporaryDirectory() as folder:
        model = IncrementalClassifier(Path(folder) / "model")
        model.learn(*_part(0, 1), method=method, **QUICK)
        model.learn(*_part(2, 3), method=method, **QUICK)
        model.rename("class 0", "zero")
        model.rename("class 1", "one")
        model.undo()
        if method == "lucir":
            asked = iter([False, True])
            with suppress(Interrupted):
                model.learn(
                    *_part(0, 2),
                    method=method,
                    again=True,
                    stop=lambda: next(asked),
                    **QUICK | {"epochs": 3},
                )
        return _files(model.path)


@cache
def run_files() -> dict[str, bytes]:
    """Return the files of a complete run; made once."""
    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder) / "run")
        return _files(Path(folder) / "run")


def _run(path: Path) -> Any:
    return run_config(tiny.config(method="lucir", analysis=False), out=path, data=DATA)


# ---------------------------------------------------------------------------------------------------------- commands


@cache
def pictures() -> dict[str, bytes]:
    """Return a folder of two class folders."""
    with tempfile.TemporaryDirectory() as folder:
        for label, picture in enumerate(DATA.test.pixels[:10].permute(0, 2, 3, 1).numpy()):
            (Path(folder) / f"class {label % 2}").mkdir(exist_ok=True)
            Image.fromarray(picture).save(Path(folder) / f"class {label % 2}" / f"{label}.png")
        return _files(Path(folder))


READS = ("info --json", "predict --json --top 4 --no-unknown", "evaluate --json")
WRITES = (
    "learn",
    "undo",
    "redo",
    "rename",
    "remove",
    "remove --for-good",
    "report",
    "info",
    "predict",
)


def command(words: str, path: Path, images: Path) -> tuple[Any, str]:
    """Give a command to a model."""
    name, *options = words.split()
    more = {
        "predict": [str(images)],
        "evaluate": [str(images)],
        "learn": [str(images), "--epochs", "1", "--threads", "1"],
        "rename": ["class 3", "three"],
        "remove": ["class 3"],
        "report": ["--out", str(path.parent / "report.html")],
    }.get(name, [])
    return geodl(name, str(path), *more, *options, notes=3)


def answer(words: str, path: Path, images: Path) -> Any:
    """Return what a read tells of a model, without what hangs on time and place; None where it is refused."""
    status, out = command(words, path, images)
    if status:
        return None
    told = json.loads(out)
    for name in (
        "images_per_second",
        "directory_bytes",
        "model",
        "unfinished",
        "undone",
        "redo",
        "undo",
    ):
        told.pop(name, None)  # how much is kept beside the last state may well change
    for each in [*told.get("classes", []), *told.get("steps", [])]:
        if isinstance(each, dict):
            (
                each.pop("learned", None),
                each.pop("time", None),
            )  # from events.jsonl, of which lines may be lost
    for each in told.get("predictions", []):
        each["name"] = Path(each["name"]).name
    return told


@cache
def right(words: str, method: str) -> Any:
    """Return what the undamaged model tells."""
    with tempfile.TemporaryDirectory() as folder:
        _put(model_files(method), Path(folder) / "model")
        _put(pictures(), Path(folder) / "images")
        found = answer(words, Path(folder) / "model", Path(folder) / "images")
        assert found is not None
        return found


def harm(draw: random.Random, path: Path, outside: Path) -> bool:
    """Damage a directory; return whether it was signed anew, so that any answer is right."""
    names = sorted(name for name, data in _files(path).items() if data)
    if draw.random() < 0.7:  # most often where it matters: in the last state
        names = [*HEADS, *objects(path, ".json")[-2:], *objects(path, ".safetensors")[-2:]]
    how = draw.randrange(6)
    if how == 0:
        return damage.odd_json(draw, path / draw.choice([*HEADS, *objects(path, ".json")[-2:]]))
    if how == 1:
        return damage.odd_tensors(draw, path / draw.choice(objects(path, ".safetensors")[-2:]))
    if how == 2:
        other_tensors(draw, path / draw.choice(objects(path, ".safetensors")[-2:]))
        return True
    if how == 3:
        outside.mkdir()
        damage.replace(draw, path / draw.choice([*names, "objects", "progress"]), outside)
    else:
        (damage.flip if how == 4 else damage.tear)(draw, path / draw.choice(names))
    return False


def other_tensors(draw: random.Random, file: Path) -> None:
    """Give one tensor of a real file another shape, type or content, or leave it out, and sign the phase anew."""
    tensors = load(file.read_bytes())
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    kinds = [
        tensor[:0] if tensor.ndim else tensor.reshape(1),
        tensor.flatten(),
        tensor.unsqueeze(0),
        torch.cat([tensor, tensor]) if tensor.ndim else tensor + 1,
        tensor.to(draw.choice([torch.float64, torch.int64, torch.uint8, torch.bool])),
        torch.full_like(tensor, float("nan"))
        if tensor.is_floating_point()
        else torch.full_like(tensor, 99),
        -tensor if tensor.dtype is not torch.bool else ~tensor,
    ]
    choice = draw.randrange(len(kinds) + 1)
    if choice == len(kinds):
        del tensors[name]
    else:
        tensors[name] = kinds[choice].contiguous()
    damage.put_anew(file, tensor_file(tensors))


@family("models", most=300)
def models(draw: random.Random, folder: Path) -> None:
    """Commands on a damaged model: the right answer or one line; whatever they write can be read."""
    method = draw.choice(METHODS)
    path, images = folder / "model", folder / "images"
    _put(model_files(method), path)
    _put(pictures(), images)
    anew = harm(draw, path, folder / "outside")
    read = draw.choice(READS)
    found = answer(read, path, images)
    assert anew or found is None or found == right(read, method), f"{read}: another answer"
    for words in draw.sample(WRITES, 2):
        command(words, path, images)
    answer("info --json", path, images)
    assert _files(images) == pictures(), "a write into the images"


@family("runs", most=60)
def runs(draw: random.Random, folder: Path) -> None:
    """The same run again over a damaged one: complete with the same files, or refused in one line; and its report."""
    path = folder / "run"
    _put(run_files(), path)
    if draw.random() < 0.5:
        cut(path, 2)
    anew = harm(draw, path, folder / "outside") if draw.random() < 0.9 else False
    found = attempt(lambda: _run(path))
    if not anew and not isinstance(found, Refused):
        for name, data in run_files().items():
            if name.startswith("objects"):
                assert (path / name).read_bytes() == data, f"complete, but another {name}"
    if draw.random() < 0.3:  # the figures take seconds
        geodl("report", str(path), "--out", str(folder / "report.html"), notes=3)
    geodl("runs", "show", str(path), notes=3)
