"""Plug-ins: every example of docs/extending.md runs, resumes, is stored and is loaded again."""

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.helpers import tiny
from tests.helpers.command import completed
from tests.helpers.command import geodl as command
from tests.helpers.runs import result_files
from torch import nn

import geodl
from geodl.bench.experiment import run_config
from geodl.bench.sweep.jobs import jobs_in, named
from geodl.config import file_layers, import_parts, imported, plugins
from geodl.config.registry import REGISTRIES
from geodl.core.errors import ConfigError, Interrupted
from geodl.core.events import EpochEnded
from geodl.learning.shared_base import base_options
from geodl.losses import DISTILLATIONS
from geodl.methods import METHODS, Method, build

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", TEXT, flags=re.M | re.S))
PARTS = {
    "eeil.py": {"method": "eeil", "balance_epochs": 2},
    "euclidean.py": {"distill": "euclidean", "euclidean_weight": 0.5},
    "median.py": {},
    "spread.py": {"selection": "spread"},
    "cutout.py": {"augment": "cutout"},
    "two_layers.py": {"network": "two-layers"},
    "stripes.py": {"data": "stripes", "stripe_width": 2},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with the files of the page; unregister their parts afterwards."""
    for name, text in EXAMPLES.items():
        (tmp_path / name).write_text(text)
    before = {kind: set(registry) for kind, registry in REGISTRIES.items()}
    monkeypatch.setattr(plugins, "IMPORTED", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for kind, names in before.items():
        for name in set(REGISTRIES[kind]) - names:
            REGISTRIES[kind].remove(name)


def config_of(folder, file, **more):
    import_parts([str(folder / file)])
    return tiny.config(**{"epochs": 1, "base": 2, **PARTS[file], **more})


def run(config, out, **how):
    """Run on the tiny data, unless the part is a source."""
    data = tiny.dataset() if config.data == "digits" else None
    return run_config(config, out=out, data=data, **how)


@pytest.mark.parametrize("file", PARTS)
def test_every_part_of_the_page_runs_and_resumes_to_the_same_weights(folder, file):
    config = config_of(folder, file)
    whole, steps, again = run(config, folder / "whole"), iter(range(1000)), None
    while again is None:
        with suppress(Interrupted):
            again = run(config, folder / "again", stop=lambda: next(steps) % 3 == 2)
    assert result_files(whole.path) == result_files(again.path)
    assert whole.phase(-1).json("extra.json")["config"]["imports"] == [str(folder / file)]
    loaded = geodl.Learner.load(whole.path)
    assert loaded.predict(tiny.dataset().test.pixels).labels.shape == (20,)
    if file == "median.py":
        assert "median" in whole.phase(-1).json("metrics.json")["accuracy"]
    part = next(iter(PARTS[file].values()), "median")
    kind = next(registry for registry in REGISTRIES.values() if part in registry)
    kind.remove(part)
    with pytest.raises(ConfigError, match=f"{part}.*--import {folder / file}"):
        geodl.Learner.load(whole.path)


def test_what_the_parts_compute(folder):
    store = run(config_of(folder, "eeil.py"), folder / "r")
    stages = [each for each in store.read_events() if each["kind"] == "stage"]
    assert [(each["phase"], each["stage"]) for each in stages] == [
        (0, "train"),
        *((t, stage) for t in (1, 2) for stage in ("train", "balance")),
    ]
    store = run(config_of(folder, "euclidean.py"), folder / "e")
    epochs = [each for each in store.read_events() if each["kind"] == "epoch"]
    assert epochs[-1]["parts"]["distill"] > 0
    loss = DISTILLATIONS["euclidean"].build(DISTILLATIONS["euclidean"].Options())
    assert loss(torch.full((2, 3), 1.0), torch.full((2, 3), 3.0)) == 12
    import_parts([str(folder / "spread.py")])
    rows = REGISTRIES["selector"]["spread"](torch.tensor([[0.0], [1], [5], [2]]), 3)
    assert rows.tolist() == [0, 2, 3]
    import_parts([str(folder / "stripes.py")])
    wide = geodl.load("stripes", stripe_width=4)
    assert wide.train.pixels[0, 0, 0].tolist() == ([0] * 4 + [255] * 4) * 2


def test_the_script_with_objects_runs(folder):
    subprocess.run([sys.executable, "objects.py"], check=True, timeout=300, cwd=folder)


def test_a_command_imports_before_it_knows_its_options(folder):
    """In separate processes, since the flags of a part are declared once."""
    words = "run --preset digits --network convnet --base 6 --phases 1 --epochs 1 --base-epochs 1"
    words += " --method eeil --balance-epochs 1 --no-cache --out r --json"
    done = completed(*words.split(), "--import", "eeil.py", cwd=folder)
    assert json.loads(done.stdout)["directory"] == "r"
    assert "balance-epochs" in completed(*words.split(), cwd=folder, status=2).stderr


def test_commands_without_the_part_name_the_import(folder):
    run(config_of(folder, "two_layers.py"), folder / "r")
    import_parts([str(folder / "spread.py")])
    REGISTRIES["backbone"].remove("two-layers")
    picture = ROOT / "docs" / "serve-page.png"
    said = command("predict", str(folder / "r"), str(picture), status=2).stderr
    assert "two-layers" in said
    assert f"--import {folder / 'two_layers.py'}" in said
    said = command("run", "--network", "two-layers", status=2).stderr
    assert "allowed values are" in said
    assert "--import" in said


def test_imports_of_files_and_their_errors(folder):
    (folder / "own.toml").write_text('import = ["eeil.py"]\nmethod = "eeil"\nbalance_epochs = 4\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        layers = file_layers(folder / "own.toml")
    assert [layer.values["balance_epochs"] for layer in layers] == [4]
    assert imported() == [str(folder / "eeil.py")]
    assert "eeil" in METHODS
    (folder / "broken.py").write_text("\n1 / 0\n")
    for name, words in {
        str(folder / "none.py"): "no such file",
        "no_such_module": "No module named",
        str(folder / "broken.py"): r"ZeroDivisionError.*broken.py, line 2",
    }.items():
        with pytest.raises(ConfigError, match=f"import = .*{words}"):
            import_parts([name])
    with pytest.raises(ConfigError, match="a list"):
        import_parts("eeil.py")


def test_a_sweep_carries_imports_and_its_status_runs_no_code(folder):
    job = named(config_of(folder, "eeil.py"), folder / "runs", "EEIL")
    job.prepare()
    assert f'import = ["{folder / "eeil.py"}"]' in job.file("toml").read_text()
    assert jobs_in(folder / "runs")[0].config == job.config
    METHODS.remove("eeil")
    plugins.IMPORTED.clear()
    with pytest.raises(ConfigError, match=r"method = 'eeil'.*--import"):
        jobs_in(folder / "runs")
    (layer,) = file_layers(job.file("toml"))  # as the process of the run reads it
    assert (layer.values["method"], imported()) == ("eeil", [str(folder / "eeil.py")])


def test_installed_packages_announce_parts(folder):
    """A package is a module and its metadata beside it."""
    metadata = folder / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[geodl.plugins]\none = eeil\ntwo = broken\n")
    (folder / "broken.py").write_text("raise RuntimeError('not today')\n")
    code = (
        "import sys, geodl, geodl.cli; assert 'torch' not in sys.modules; import geodl.methods; "
        "print(*geodl.methods.METHODS)"
    )
    done = completed(code=code, cwd=folder)
    assert done.stdout.split()[-1] == "eeil"
    assert "not today" in done.stderr


def test_shared_bases_depend_on_the_code_of_plug_ins(folder):
    assert base_options(build(tiny.config()), 2)["code"] == []
    config = config_of(folder, "two_layers.py")
    before = base_options(build(config), 2)
    assert "nn.Sequential" in before["code"][0]
    assert base_options(build(config), 2) == before
    assert base_options(build(tiny.config(augment="trivial", network="resnet8")), 2)["code"] == []


class Levels(nn.Module):
    """A backbone with its own levels and width, for 8 x 8 images only."""

    width, level_grids = 6, {"low": 2, "high": 1}

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3)

    def levels(self, x):
        low = self.low(x)
        return {"low": low, "high": self.high(low)}

    def forward(self, x):
        assert x.shape[2] == 8
        return self.levels(x)["high"]


def learned(**options):
    """Return a learner of two phases of the tiny data."""
    data = tiny.dataset()
    given = {key: tiny.OPTIONS[key] for key in ("batch_size", "lr", "threads", "precision")}
    learner = geodl.Learner(**given | {"epochs": 1, "exemplars": 2} | options)
    learner.learn(data.train.pixels[:18], data.train.labels[:18])
    learner.learn(data.train.pixels[18:], data.train.labels[18:])
    return learner


@pytest.mark.parametrize("method", ["lucir", "analytic"])
@pytest.mark.parametrize("network", [Levels, Levels()])
def test_a_learner_takes_any_module_and_loads_it_again(folder, method, network):
    before = network.state_dict() if isinstance(network, nn.Module) else {}
    before = {key: tensor.clone() for key, tensor in before.items()}
    more = {"expansion": 64} if method == "analytic" else {}
    learner = learned(method=method, network=network, **more)
    assert all(tensor.equal(network.state_dict()[key]) for key, tensor in before.items())
    assert learner.config.network == "own:Levels"
    assert learner.network.level_names == ("low", "high")
    learner.save(folder / "model")
    again = geodl.Learner.load(folder / "model", network=Levels())
    x = tiny.dataset().test.pixels
    assert (again.predict(x).labels == learner.predict(x).labels).all()
    again.learn(x[:5], tiny.dataset().test.labels[:5])
    unloaded = geodl.Learner.load(folder / "model")
    assert unloaded.classes == learner.classes
    with pytest.raises(ConfigError, match=r"own:Levels.*Learner\.load"):
        unloaded.predict(x)
    with pytest.raises(ConfigError, match="own:Levels"):
        geodl.Learner.load(folder / "model", network=nn.Conv2d(3, 5, 3))


@pytest.mark.parametrize(
    ("network", "words"),
    [(nn.Flatten(0), "(B, d)"), (nn.Linear(3, 3), "width"), (lambda: 3, "torch module")],
)
def test_an_invalid_backbone_is_refused(network, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        learned(network=network)


def test_a_learner_takes_methods_and_other_parts_as_they_are(folder):
    class Scaled(Method):
        """Cross-entropy times a constructor argument."""

        name, summary, paper = "scaled", "", ""

        def __init__(self, factor=1.0):
            super().__init__()
            self.factor = factor

        def loss(self, phase, batch, student, teacher):
            yield "ce", self.factor * phase.cross_entropy(student.logits, batch.labels)

    def first(features, k):
        return torch.arange(min(k, len(features)))

    heard = []
    options = {"network": "convnet", "selection": first, "listener": heard.append}
    halved = learned(method=Scaled(0.5), **options)
    once = learned(method=Scaled(), **options)
    losses = [event.loss for event in heard if isinstance(event, EpochEnded)]
    assert losses[0] == pytest.approx(losses[2] / 2, rel=0.3)
    assert halved.memory.images.pixels[0].equal(tiny.dataset().train.pixels[0])
    halved.save(folder / "m")
    again = geodl.Learner.load(folder / "m", method=Scaled(0.5))
    assert (again.method.factor, again.config.method) == (0.5, "scaled")
    assert once.config.selection == "first"
