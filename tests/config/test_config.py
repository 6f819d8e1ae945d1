"""Options: declared once, merged from layers with their origins, and validated."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geodl.config import (
    COMMON,
    SECTIONS,
    Layer,
    Options,
    RunConfig,
    all_options,
    file_layers,
    preset_layer,
    presets,
)
from geodl.config.options import IDENTITY_FREE
from geodl.config.registry import REGISTRIES
from geodl.core.errors import ConfigError
from geodl.core.keys import derive
from geodl.losses import DISTILLATIONS
from geodl.methods import METHODS, configure, stored_config
from geodl.model.classifiers import CLASSIFIERS


def flags(**values):
    return Layer("command line", values)


def config_of(**values):
    return configure([flags(**values)]).config


def test_a_method_keeps_its_own_defaults_unless_they_are_set():
    assert config_of(method="lucir").distill == "cosine"
    # A common default on the command line must not override a method's own.
    config = config_of(method="bic", epochs=3)
    assert (config.distill, config.epochs) == ("lwf", 3)
    assert config_of(method="lucir", distill="none").distill == "none"


def test_later_layers_win_and_origins_are_recorded(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('preset = "cifar100"\nlr = 0.3\n[bic]\nepochs = 7\n')
    found = configure([*file_layers(file), flags(method="bic", seed=5)])
    assert found.config.epochs == 7
    assert found.config.weight_decay == 2e-4  # the preset's table for BiC, not its common value
    assert {
        "epochs": f"file {file}",
        "lr": f"file {file}",
        "data": "preset cifar100",
        "weight_decay": "preset cifar100",
        "distill": "default of bic",
        "correction_epochs": "default of bic",
        "momentum": "default",
        "seed": "command line",
    }.items() <= found.origins.items()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        # Unknown options, values of the wrong type or range, impossible combinations.
        ({"epoch": 3}, ["epoch = 3 (command line)", "did you mean epochs?"]),
        ({"parts": {}}, ["parts = {} (command line)", "no such option"]),
        ({"epochs": "many"}, ["epochs = 'many' (command line)", "integer"]),
        ({"epochs": 0}, ["epochs = 0 (command line)", "greater than or equal to 1"]),
        ({"std": [1.0, 0.0, 1.0]}, ["std = 0.0 (command line)", "greater than 0"]),
        ({"crop": "middle"}, ["crop = 'middle' (command line)", "'pad', 'whole' or 'resized'"]),
        ({"order": "seed"}, ["order = 'seed'", "order_seed"]),
        ({"order_seed": 3}, ["order_seed = 3", "'seed'", "'lucir-1993'"]),
        ({"milestones": [0.7, 0.2]}, ["milestones = (0.7, 0.2)", "between 0 and 1"]),
        # Parts.
        ({"network": "alexnet"}, ["network = 'alexnet' (command line)", "resnet32", "timm:NAME"]),
        ({"method": "foo"}, ["method = 'foo' (command line)", *METHODS]),
        ({"method": ["lucir"]}, ["method = ['lucir'] (command line)", *METHODS]),
        ({"distill": "geo"}, ["distill = 'geo' (command line)", "none", *DISTILLATIONS]),
        ({"method": "joint", "distill": "cosine"}, ["distill = 'cosine'", "joint", "none"]),
        # Options of parts that are not in use.
        ({"distill": "geodesic", "subspace_dim": 0}, ["subspace_dim = 0", "equal to 1"]),
        ({"method": "bic", "margin": 1}, ["margin = 1", "method lucir, method mne", "method bic"]),
        ({"subspace_dim": 64}, ["subspace_dim = 64", "tion geodesic", "distillation cosine"]),
        # Tables.
        ({"bic": {"epochz": 3}}, ["epochz = 3 (command line, table bic)", "epochs?"]),
        ({"bic": {"margin": 3}}, ["margin = 3 (command line, table bic)", "method lucir"]),
        ({"method": "bic", "bic": {"distill": "pod"}}, ["distill = 'pod' (command line)", "none"]),
        ({"lucir": {"subspace_dim": 64}}, ["subspace_dim = 64", "distillation geodesic"]),
        (
            {"lucir": {"method": "bic"}},
            ["method = 'bic' (command line, table lucir)", "not allowed"],
        ),
        ({"distillation": {"lwf": {"lr": 1}}}, ["lr = 1", "table lwf", "not allowed"]),
        ({"distillation": 3}, ["distillation = 3 (command line)", "table"]),
        ({"distillation": {"lwf": 3}}, ["lwf = 3", "table distillation"]),
        ({"distillation": {"geo": {}}}, ["distillation.geo (command line)", *DISTILLATIONS]),
        ({"distillation": {"geodesic": {"temperature": 3.0}}}, ["temperature", "distillation lwf"]),
    ],
)
def test_errors_name_key_value_and_remedy_in_one_line(values, words):
    with pytest.raises(ConfigError) as caught:
        config_of(**values)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_errors_of_files_and_presets(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        file_layers(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("epochs = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML"):
        file_layers(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=f"preset = 'nope': .*{', '.join(presets())}"):
        preset_layer("nope")


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("method", METHODS)
def test_every_preset_is_valid_for_every_method(name, method):
    config = configure([preset_layer(name), flags(method=method)]).config
    assert config.method == method
    assert presets()[name]


def test_the_paper_s_hyper_parameters_are_the_presets():
    def check(preset, method, **expected):
        config = configure([preset_layer(preset), flags(method=method)]).config
        assert {name: getattr(config, name) for name in expected} == expected
        return config

    training = {"epochs": 160, "lr": 0.1, "milestones": (0.5, 0.75), "lr_decay": 0.1}
    training |= {"batch_size": 128, "weight_decay": 5e-4, "momentum": 0.9, "exemplars": 20}
    check("cifar100", "lucir", **training, padding=4, flip=True, jitter=0.0)
    check("cifar100", "bic", epochs=250, milestones=(0.4, 0.6, 0.8), weight_decay=2e-4)
    training = {"base": 500, "epochs": 90, "weight_decay": 1e-4, "network": "resnet18"}
    images = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "image_size": 224}
    imagenet = check("imagenet", "lucir", **training, **images, crop="resized")
    assert imagenet["cosine_weight"] == 10


def test_the_hash_covers_what_is_computed_and_nothing_else():
    config = config_of(method="lucir")
    for name in ("threads", "devices", "nodes", "workers", "checkpoint_steps"):
        assert config.model_copy(update={name: 3}).hash() == config.hash(), name
    changes = {"lr": 0.3, "seed": 9, "distill": "none", "margin": 0.1, "precision": "bf16"}
    for name, value in changes.items():
        assert config_of(method="lucir", **{name: value}).hash() != config.hash(), name
    # Pinned: directories and stored results are named by it.
    assert config.hash() == "8d19bea4"
    assert config_of(method="bic", epochs=3, distill="geodesic").hash() == "576f2b0c"
    assert frozenset(SECTIONS["Machine"].model_fields) > IDENTITY_FREE


def test_a_stored_configuration_is_flat_and_may_be_of_another_version():
    found = config_of(distill="geodesic", subspace_dim=9)
    stored = found.identity()
    assert (stored["subspace_dim"], stored["margin"]) == (9, 0.5)
    assert stored_config(stored | {"gone": 3}) == found
    del stored["hold_out"], stored["weight_factor"]  # version 0.2 had none
    assert stored_config(stored) == found


def test_every_option_has_words_and_a_heading():
    assert list(RunConfig.model_fields) == [*COMMON, "parts"]
    for name, info in all_options().items():
        assert info.description, name
    found = config_of(distill="geodesic")
    shown = [name for names in found.headings().values() for name in names]
    assert sorted(shown) == sorted(found.flat())


@pytest.fixture
def parts():
    """Let a test add parts, and remove them afterwards."""
    before = {kind: set(registry) for kind, registry in REGISTRIES.items()}
    yield
    for kind, registry in REGISTRIES.items():
        for name in set(registry) - before[kind]:
            registry.remove(name)


def test_a_part_brings_its_options_along():
    found = configure([flags(method="lucir", distill="geodesic", subspace_dim=9)])
    assert found.config.of(DISTILLATIONS["geodesic"].Options).subspace_dim == 9
    assert found.config.of(METHODS["lucir"].Options).margin == 0.5
    assert (found.config["geodesic_weight"], found.config["margin"]) == (6.0, 0.5)
    assert found.origins["subspace_dim"] == "command line"
    assert found.origins["geodesic_weight"] == "default of geodesic"
    assert found.origins["margin"] == "default of lucir"
    assert config_of(method="finetune").flat().keys() == COMMON.keys()


def test_a_name_and_the_names_of_options_are_taken_once(parts):
    class Clash(Options):
        margin: int = 3

    class Common(Options):
        lr: float = 0.1

    class Part:
        def __init__(self, options):
            self.Options = options

    METHODS.add("own", Part(Clash))  # one method is in use at a time
    with pytest.raises(ConfigError, match="'own'"):
        METHODS.add("own", Part(Options))
    with pytest.raises(ConfigError, match=r"margin.*method lucir"):
        DISTILLATIONS.add("own", Part(Clash))
    with pytest.raises(ConfigError, match="lr"):
        DISTILLATIONS.add("own", Part(Common))
    with pytest.raises(ConfigError, match="'none'"):
        DISTILLATIONS.add("none", Part(Options))
    assert "own" not in DISTILLATIONS
    assert "own" in METHODS


def test_a_class_that_is_defined_again_replaces_itself(parts):
    def define(default):
        class Again(METHODS["finetune"]):
            name = "again"
            Options = type("AgainOptions", (Options,), {"defaults": {"epochs": default}})

        METHODS.add("again", Again)

    define(3)
    define(4)
    assert config_of(method="again").epochs == 4


def test_tables_of_distillations_count_only_where_they_are_in_use(tmp_path):
    def found(weight: float, **given):
        file = tmp_path / "own.toml"
        file.write_text(
            f"[distillation.geodesic]\ngeodesic_weight = {weight}\n[distillation.lwf]\ntemperature = 3.0\n"
        )
        return configure([*file_layers(file), flags(method="lucir", **given)])

    used = found(2.5, distill="geodesic")
    assert used.config["geodesic_weight"] == 2.5
    assert used.origins["geodesic_weight"] == f"file {tmp_path / 'own.toml'}"
    assert used.config.hash() != found(2.0, distill="geodesic").config.hash()
    plain = configure([Layer("no file", {})])
    assert found(2.5).config.hash() == found(2.0).config.hash() == plain.config.hash()
    assert not any("geodesic" in name for name in found(2.5).config.identity())
    assert found(2.5, distill="geodesic", geodesic_weight=7.0).config["geodesic_weight"] == 7.0
    # A method's own table may hold options of the distillation that it is used with.
    mine = config_of(method="lucir", lucir={"distill": "geodesic", "subspace_dim": 5})
    assert (mine.distill, mine["subspace_dim"]) == ("geodesic", 5)


def test_what_a_model_fixes_for_good():
    def fixed(**values):
        return set(config_of(**values).fixed_in_model())

    trained = fixed(method="lucir", distill="geodesic")
    assert {"network", "image_size", "mean", "std", "scale"} <= trained
    assert not trained & {"exemplars", "margin", "subspace_dim", "seed", "epochs", "threads"}
    # What was learned in closed form holds for these alone.
    own = {"adapt", "distill", "seed", "levels", "keep_features"}
    assert fixed(method="analytic") - trained == own


def test_options_of_a_classifier_are_there_where_it_is_fitted():
    closed = configure([preset_layer("digits"), flags(method="analytic")])
    assert closed.config["expansion"] == 1024
    assert closed.config.of(CLASSIFIERS["analytic"].Options).gamma == 0.01
    assert closed.origins["gamma"] == "default of analytic"
    with pytest.raises(ConfigError, match=r"gamma = 1 .* classifier analytic"):
        config_of(method="lucir", gamma=1)


@given(st.integers(0, 2**62), st.lists(st.integers() | st.text(), max_size=4))
def test_derived_keys_are_stable_and_in_range(seed, keys):
    key = derive(seed, *keys)
    assert key == derive(seed, *keys)
    assert 0 <= key < 2**63


def test_derived_keys_differ_by_purpose_and_are_those_of_every_version():
    assert len({derive(1, "a"), derive(1, "b"), derive(2, "a"), derive(1, "a", 0)}) == 4
    # pinned: runs of every version agree
    assert derive(1, "batches", 0, "train") == 9103172288450888587


def test_the_configuration_is_frozen_and_paths_survive_json():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().epochs = 3
    config = config_of(method="lwf", data_dir="some/where")
    assert config.data_dir == Path("some/where")
    assert config.identity()["data_dir"] == "some/where"
