"""Golden results: tensors, metrics and predictions of small real runs, to compare two versions.

They depend on the processor, so no file is part of the repository. Write it with the old commit,
then check the new one on the same machine, with the same versions of torch and its libraries::

    PYTHONPATH=OLD/src python -m tests.goldens write goldens.json
    PYTHONPATH=NEW/src python -m tests.goldens check goldens.json [CASE ...]

Everything runs on one CPU thread and, except in `flowers-command`, in float32. A tensor is known by
the SHA-256 of its type, shape and bytes: its name and file may change, but it must be stored after
the same step. Metrics and labels are compared exactly, confidences within a tolerance. `CHANGED`
lists what is otherwise than in an earlier version on purpose, and why. Photographs are read below
the directory GEODL_DATA; cases that need them are skipped where there are none.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before torch is imported

import numpy as np
from safetensors import deserialize

import geodl

CLOSED_FORM = "analytic.*|two-ranks-analytic|returning-analytic|returning-features|switch|flowers.*"
JUDGED = r"memory/own\.(confidences|numbers|validated|last|rows)|predicted .*"
CHANGED = {  # by version: (case, tensor or metric, reason), patterns that match the whole name
    "0.2.0": [
        (".*", "memory/store_images", "an option, which the configuration holds too"),
        (".*", ".*/analytic_single", "scores without mirrored copies are an option of evaluation"),
        ("flowers.*", r"memory/validation\..*", "pictures kept to show are stored encoded"),
        (CLOSED_FORM, JUDGED, "confidences hold the probability of a known class"),
        ("flowers.*", ".*", "features of large images are read by onnxruntime: other last digits"),
        (
            "returning-features|switch",
            ".*",
            "levels and ridge are chosen with whole series left out; of over 5,000 images on a sample",
        ),
    ]
}
PREDICTIONS, GRAPH = 1e-6, 1e-5  # tolerances of confidences: predicted, by the exported graph
HERE = Path(__file__).absolute()
DATA = Path(os.environ.get("GEODL_DATA") or HERE.parents[2] / "shared" / "data").absolute()


class Record:
    """What a case found: tensors by state; exact values; close ones as [tolerance, *numbers]."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[list[str]]] = {}
        self.exact: dict[str, Any] = {}
        self.close: dict[str, list[float]] = {}

    def state(self, name: str, files: Mapping[str, bytes]) -> None:
        """Add the tensors and the metrics of a stored state."""
        found = self.tensors[name] = []
        for file, content in sorted(files.items()):
            if file.endswith(".safetensors"):
                for key, entry in sorted(deserialize(content)):
                    form = f"{entry['dtype']} {list(entry['shape'])} ".encode()
                    digest = hashlib.sha256(form + bytes(entry["data"])).hexdigest()
                    found.append([f"{file.removesuffix('.safetensors')}/{key}", digest])
        self.exact |= flattened(json.loads(files.get("metrics.json", b"{}")), name)

    def predictions(self, labels: list[str], confidences: list[float]) -> None:
        """Add predicted labels and their confidences."""
        self.exact["predicted labels"] = labels
        self.close["predicted confidences"] = [PREDICTIONS, *confidences]


def flattened(value: Any, name: str) -> dict[str, Any]:
    """Return the leaves of nested dicts by their paths; lists are leaves."""
    if not isinstance(value, dict):
        return {name: value}
    found = {}
    for key, part in value.items():
        found |= flattened(part, f"{name}/{key}")
    return found


def states(directory: Path) -> Iterator[dict[str, bytes]]:
    """Yield the files of each state, oldest first: format 3 (head.json) or older (phases/NN)."""
    if (directory / "head.json").exists():
        objects = directory / "objects"
        for entry in json.loads((directory / "head.json").read_text())["phases"]:
            listed = entry["files"].items()
            yield {name: (objects / sha256).read_bytes() for name, (sha256, _) in listed}
    else:
        folders = (directory / "phases").iterdir()
        for folder in sorted(folders, key=lambda path: int(path.name)):
            yield {path.name: path.read_bytes() for path in folder.iterdir()}


def last_state(directory: Path) -> dict[str, bytes]:
    return list(states(directory))[-1]


def command(line: str, folder: Path) -> str:
    """Run a command of geodl's in a folder, in a process of its own; return what it printed."""
    environment = os.environ | {"PYTHONPATH": str(Path(geodl.__file__).parents[1])}
    words = [sys.executable, "-m", "geodl", *shlex.split(line)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"geodl {line}: {done.stderr.strip()[-1000:]}")
    return done.stdout


# -- runs from the command line: the tensors and metrics of every phase

QUICK = "--epochs 2 --base-epochs 3"
RANKS = "--devices 2 --accelerator cpu"
OPTIONS = (
    "--selection nearest --order seed --order-seed 3 --augment trivial --jitter 0.2 --flip "
    "--schedule step --nesterov --no-norm-decay --clip-norm 1 --label-smoothing 0.1 "
    "--network convnet --base 0 --phases 5 --seed 7"
)
RUNS = {
    "finetune": "--method finetune",
    "lwf": "--method lwf",
    "icarl": "--method icarl",
    "bic": "--method bic",
    "lucir": "--method lucir",
    "mnemonics": "--method mnemonics",
    "joint": "--method joint",
    "analytic": "--method analytic",
    "lucir-geodesic": "--method lucir --distill geodesic --ame",
    "finetune-cosine": "--method finetune --distill cosine",
    "icarl-geodesic": "--method icarl --distill geodesic",
    "bic-total": "--method bic --exemplars 43 --memory-budget total",
    "lucir-total": f"--method lucir --exemplars 43 --memory-budget total {QUICK}",
    "lucir-no-exemplars": f"--method lucir --exemplars 0 {QUICK}",
    "analytic-exemplars": f"--method analytic --exemplars 5 --ame {QUICK}",
    "analytic-flip": f"--method analytic --flip {QUICK}",
    "analytic-mirror-training": f"--method analytic --flip --mirror-training {QUICK}",
    "options": f"--method lucir --distill lwf {OPTIONS} {QUICK}",
    "two-ranks": f"--method lucir --distill geodesic --batch-size 50 {QUICK} {RANKS}",
    "two-ranks-bic": f"--method bic {QUICK} {RANKS}",
    "two-ranks-analytic": f"--method analytic {QUICK} {RANKS}",
}


def run(record: Record, folder: Path, options: str) -> None:
    """Run the digits preset with some options."""
    command(f"run --preset digits --no-cache --quiet --out run {options}", folder)
    for t, files in enumerate(states(folder / "run")):
        record.state(f"phase {t}", files)


# -- learners in Python


def digits(part: str, *classes: int, rows: slice = slice(None)) -> tuple[Any, list[str]]:
    """Return digits as arrays (N, 3, 8, 8) with their class names: some images of each class."""
    images = getattr(geodl.load("digits"), part)
    chosen = [np.flatnonzero(images.labels == label)[rows] for label in classes]
    names = np.repeat([f"class {label}" for label in classes], list(map(len, chosen)))
    return images.pixels.numpy()[np.concatenate(chosen)], names.tolist()


def keep(record: Record, folder: Path, name: str, learner: Any, test: Sequence[Any]) -> None:
    """Save a learner, and add its state and what it makes of test images."""
    learner.save(folder / name)
    record.state(name, last_state(folder / name))
    for classifier, confusion in learner.evaluate(*test).items():
        record.exact[f"{name}/evaluated accuracy/{classifier}"] = confusion.accuracy
        record.exact[f"{name}/evaluated counts/{classifier}"] = confusion.counts.tolist()


def predict(record: Record, model: Path, images: Any) -> None:
    found = geodl.Learner.load(model).predict(images)
    record.predictions([each.label for each in found], [each.confidence for each in found])


def scenario(record: Record, folder: Path) -> None:
    """Go through a scenario in a loop, as in a notebook."""
    learner = geodl.Learner(preset="digits", method="lucir", distill="geodesic")
    for t, phase in enumerate(geodl.ClassIncremental(geodl.load("digits"), base=4, phases=3)):
        learner.learn(phase.train)
        keep(record, folder, f"phase {t}", learner, [phase.test])


def returning(record: Record, folder: Path, **options: Any) -> None:
    """Learn more images of a known class; remove a class, load the rest, learn it again."""
    learner = geodl.Learner(preset="digits", epochs=3, base_epochs=4, **options)
    learner.learn(*digits("train", 0, 1, 2, 3, rows=slice(0, 70)))
    keep(record, folder, "first", learner, digits("test", 0, 1, 2, 3))
    learner.learn(*digits("train", 1, 4, 5, rows=slice(70, None)))
    keep(record, folder, "returning", learner, digits("test", 0, 1, 2, 3, 4, 5))
    learner.remove("class 2")
    keep(record, folder, "removed", learner, digits("test", 0, 1, 3, 4, 5))
    learner = geodl.Learner.load(folder / "removed")
    learner.learn(*digits("train", 2, 6, 7))
    keep(record, folder, "loaded", learner, digits("test", *range(8)))
    predict(record, folder / "loaded", digits("test", *range(10), rows=slice(2))[0])


def switch(record: Record, folder: Path) -> None:
    """Closed form from one class on: features are kept, of more than 5,000 images only sums."""
    options = {"method": "analytic", "keep_features": True, "train_base": False, "flip": True}
    learner = geodl.Learner(preset="digits", **options)
    shifts = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))
    for t, (first, last) in enumerate([(0, 0), (1, 2), (3, 7), (8, 9)]):
        images, names = digits("train", *range(first, last + 1))
        copies = [np.roll(images, by, axis=(2, 3)) for by in shifts]
        learner.learn(np.concatenate(copies), names * len(shifts))  # 0 to 7: more than 5,000
        keep(record, folder, f"phase {t}", learner, digits("test", *range(last + 1)))
    learner.remove("class 4")
    keep(record, folder, "removed", learner, digits("test", 0, 1, 2, 3, 5, 6, 7, 8, 9))


# -- models of a person's images


def change(record: Record, folder: Path, *lines: str) -> None:
    for line in lines:
        command(line, folder)
        record.state(line, last_state(folder / "model"))


def trained(record: Record, folder: Path) -> None:
    """Train a model that keeps exemplars and validation images; rename and remove classes."""
    options = {"method": "lucir", "epochs": 3, "exemplars": 8, "precision": "32", "threads": 1}
    groups = [((0, 1, 2), slice(0, 60)), ((2, 3, 4), slice(60, 120))]
    for t, (classes, rows) in enumerate(groups):
        images, names = digits("train", *classes, rows=rows)
        geodl.IncrementalClassifier(folder / "model").learn(images, names, **options)
        record.state(f"step {t}", last_state(folder / "model"))
    change(record, folder, "rename model 'class 1' one", "remove model 'class 3'")
    predict(record, folder / "model", digits("test", *range(10), rows=slice(2))[0])


def photographs() -> list[Path]:
    """Return 20 photographs, one or so of each kind."""
    return sorted(DATA.glob("flowers20/test/*/*.jpg"))[::23]


def flowers(record: Record, folder: Path) -> None:
    """Learn photographs in three steps, predict, export; rename and remove classes."""
    for week in ("week1", "week2", "week3"):
        model = geodl.IncrementalClassifier(folder / "model")
        model.learn(DATA / "flowers20" / week, precision="32", threads=1)
        record.state(week, last_state(folder / "model"))
    predict(record, folder / "model", photographs())
    command("export model model.onnx", folder)
    graph(record, folder / "model.onnx")
    change(record, folder, "rename model rose roses", "remove model foxglove")


def graph(record: Record, path: Path) -> None:
    """Add the outputs of an exported file for photographs."""
    import onnxruntime
    from PIL import Image

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (pixels,) = session.get_inputs()
    squares = [Image.open(file).convert("RGB").resize(pixels.shape[2:]) for file in photographs()]
    batch = np.stack(list(map(np.asarray, squares))).transpose(0, 3, 1, 2)
    outputs = session.run(None, {pixels.name: batch})
    for output, values in zip(session.get_outputs(), outputs, strict=True):
        record.close[f"graph/{output.name}"] = [GRAPH, *values.astype(float).flatten().tolist()]


def flowers_command(record: Record, folder: Path) -> None:
    """Learn and predict by the command line, in the precision that it chooses for this machine."""
    week = shlex.quote(str(DATA / "flowers20" / "week2"))
    command(f"learn model {week} --threads 1 --exemplars 0", folder)
    record.state("week2", last_state(folder / "model"))
    files = shlex.join(map(str, photographs()))
    found = json.loads(command(f"predict model {files} --json", folder))["predictions"]
    record.predictions([each["label"] for each in found], [each["confidence"] for each in found])


CASES: dict[str, Callable[[Record, Path], None]] = {
    **{name: partial(run, options=options) for name, options in RUNS.items()},
    "scenario": scenario,
    "returning-lucir": partial(returning, method="lucir", distill="geodesic"),
    "returning-icarl": partial(returning, method="icarl"),
    "returning-bic": partial(returning, method="bic"),
    "returning-analytic": partial(returning, method="analytic"),
    "returning-features": partial(returning, method="analytic", keep_features=True),
    "switch": switch,
    "trained": trained,
    "flowers": flowers,
    "flowers-command": flowers_command,
}


# -- writing and checking


def results(names: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Yield what each case finds; one that fails has found `failed` alone."""
    for name in names:
        if name.startswith("flowers") and not photographs():
            print(f"{name}: skipped, no photographs below {DATA} (GEODL_DATA)", flush=True)
            continue
        began, record = time.perf_counter(), Record()
        with tempfile.TemporaryDirectory() as folder:
            try:
                CASES[name](record, Path(folder))
            except Exception as error:  # the other cases are worth knowing, too
                record.exact["failed"] = f"{type(error).__name__}: {error}"
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
        yield name, record


def differences(golden: Mapping[str, Any], found: Record) -> Iterator[tuple[str, str]]:
    """Yield (name, problem) for all that is missing or differs; additions are none."""
    for state, tensors in golden["tensors"].items():
        there = Counter(digest for _, digest in found.tensors.get(state, []))
        for name, digest in tensors:
            there[digest] -= 1
            if there[digest] < 0:
                yield name, f"no such tensor after {state}"
    for name, value in golden["exact"].items():
        other = found.exact.get(name, "nothing")
        if other != value:
            yield name, f"{str(value)[:100]} before, {str(other)[:100]} now"
    for name, (tolerance, *values) in golden["close"].items():
        _, *others = found.close.get(name, [0])
        same = len(values) == len(others)
        worst = np.abs(np.subtract(values, others)).max() if same else np.inf
        if not worst <= tolerance:
            yield name, f"differs by {worst:.2g}, more than {tolerance}"


def reason_to_differ(version: str, case: str, name: str) -> str | None:
    for cases, names, reason in CHANGED.get(version, []):
        if re.fullmatch(cases, case) and re.fullmatch(names, name):
            return reason
    return None


def write(path: Path, names: Sequence[str]) -> bool:
    """Write what the cases find into a file, in which others stay; return whether none failed."""
    content = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    cases, sound = content["cases"], True
    for name, found in results(names or list(CASES)):
        if "failed" in found.exact:
            print(f"  {name}: {found.exact['failed']}")
            sound = False
        else:
            cases[name] = vars(found)
    path.write_text(json.dumps({"version": geodl.__version__, "cases": cases}, indent=1))
    return sound


def check(path: Path, names: Sequence[str]) -> bool:
    """Print what is missing or differs from a file, and return whether nothing does."""
    content = json.loads(path.read_text())
    cases, version, sound = content["cases"], content["version"], True
    for name, found in results(names or list(cases)):
        if "failed" in found.exact or name not in cases:
            problems = [(name, found.exact.get("failed", f"no such case in {path}"))]
        else:
            problems = list(differences(cases[name], found))
        meant: Counter[str] = Counter()
        for each, problem in problems:
            if (reason := reason_to_differ(version, name, each)) is not None:
                meant[reason] += 1
            else:
                print(f"  {name}: {each}: {problem}")
                sound = False
        for reason, count in meant.items():
            print(f"  {name}: {count} otherwise on purpose: {reason}")
    print("all is as it was" if sound else "there are differences")
    return sound


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.goldens")
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    given = parser.parse_args()
    if unknown := set(given.cases) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    action = write if given.action == "write" else check
    return 0 if action(given.file, given.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
