"""Options: declared once, filled from layers, checked, and told apart by where they come from."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geodl.config import (
    Layer,
    RunConfig,
    derive,
    file_layers,
    groups_of_options,
    option,
    preset_layer,
    presets,
    restate,
)
from geodl.config.options import roles_of
from geodl.errors import ConfigError
from geodl.losses import DISTILLATIONS
from geodl.methods import METHODS, configure, kinds


def given_on_the_command_line(**values):
    return Layer("command line", values)


def test_a_method_keeps_its_own_defaults_unless_told_otherwise():
    assert configure([given_on_the_command_line(method="lucir")]).config.distill == "cosine"
    assert configure([given_on_the_command_line(method="lwf")]).config.distill == "lwf"
    # A common default on the command line must not override a method's: only what was given counts.
    found = configure([given_on_the_command_line(method="bic", epochs=3)])
    assert (found.config.distill, found.config.epochs) == ("lwf", 3)
    assert configure([given_on_the_command_line(method="lucir", distill="none")]).config.distill == "none"


def test_later_layers_win_and_every_origin_is_told(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('preset = "cifar100"\nlr = 0.3\n[bic]\nepochs = 7\n')
    found = configure([*file_layers(file), given_on_the_command_line(method="bic", seed=5)])
    assert found.config.epochs == 7
    assert found.origins["epochs"] == f"file {file}"
    assert found.origins["lr"] == f"file {file}"
    assert found.origins["data"] == "preset cifar100"
    assert found.origins["weight_decay"] == "preset cifar100"
    assert found.config.weight_decay == 2e-4  # the preset's table for BiC, not its common value
    assert found.origins["distill"] == "default of bic"
    assert found.origins["correction_epochs"] == "default of bic"
    assert found.origins["momentum"] == "default"
    assert found.origins["seed"] == "command line"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, "epoch (command line): no such option; did you mean epochs?"),
        ({"epochs": "many"}, "epochs = 'many' (command line): input should be a valid integer"),
        ({"epochs": 0}, "epochs = 0 (command line): input should be greater than or equal to 1"),
        (
            {"distill": "geodesic", "subspace_dim": 0},
            "subspace_dim = 0 (command line): input should be greater than or equal to 1",
        ),
        ({"method": "foo"}, f"method = 'foo' (command line): {', '.join(METHODS)} are allowed"),
        ({"distill": "geo"}, "distill = 'geo' (command line): none, lwf, cosine, geodesic are allowed"),
        ({"method": "bic", "bic": {"distill": "pod"}}, "distill = 'pod' (command line): none, lwf, cosine, geodesic"),
        ({"distill": 3}, "distill = 3 (command line): none, lwf"),
        ({"method": "joint", "distill": "cosine"}, "distill = 'cosine' (command line): input should be 'none'"),
        ({"method": "bic", "margin": 1}, "margin (command line): an option of lucir, mnemonics, not of bic"),
        ({"method": ["lucir"]}, f"method = ['lucir'] (command line): {', '.join(METHODS)} are allowed"),
        (
            {"order": "seed", "order_seed": -1},
            "order_seed = -1 (command line): input should be greater than or equal to 0",
        ),
        ({"bic": {"epochz": 3}}, "epochz (command line, table bic): no such option; did you mean epochs?"),
        ({"order": "seed"}, "order = 'seed' needs order_seed"),
        ({"order_seed": 3}, "order_seed = 3 is used only with order = 'seed', not 'lucir-1993'"),
        ({"milestones": [0.7, 0.2]}, "milestones = (0.7, 0.2): rising fractions between 0 and 1 are allowed"),
        ({"memory_budget": "both"}, "memory_budget = 'both' (command line): input should be 'per_class' or 'total'"),
        ({"distillation": 3}, "distillation = 3 in command line: a table of options is allowed here"),
        ({"lucir": 3}, "lucir = 3 in command line: a table of options is allowed here"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(values, message):
    with pytest.raises(ConfigError) as caught:
        configure([given_on_the_command_line(**values)])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_bad_files_are_said_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        file_layers(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("epochs = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML"):
        file_layers(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=f"preset = 'nope': {', '.join(presets())} are allowed"):
        preset_layer("nope")


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("method", METHODS)
def test_every_preset_is_valid_for_every_method(name, method):
    config = configure([preset_layer(name), given_on_the_command_line(method=method)]).config
    assert config.method == method
    assert presets()[name]


def test_the_paper_s_hyper_parameters_are_the_presets():
    cifar = configure([preset_layer("cifar100"), given_on_the_command_line(method="lucir")]).config
    assert (cifar.epochs, cifar.lr, cifar.batch_size, cifar.weight_decay, cifar.milestones) == (
        160,
        0.1,
        128,
        5e-4,
        (0.5, 0.75),
    )
    assert (cifar.momentum, cifar.lr_decay, cifar.padding, cifar.flip, cifar.jitter, cifar.exemplars) == (
        0.9,
        0.1,
        4,
        True,
        0.0,
        20,
    )
    bic = configure([preset_layer("cifar100"), given_on_the_command_line(method="bic")]).config
    assert (bic.epochs, bic.milestones, bic.weight_decay) == (250, (0.4, 0.6, 0.8), 2e-4)
    imagenet = configure([preset_layer("imagenet"), given_on_the_command_line(method="lucir")]).config
    assert (imagenet.base, imagenet.epochs, imagenet.weight_decay, imagenet.network) == (500, 90, 1e-4, "resnet18")
    assert (imagenet.image_size, imagenet.crop, imagenet.mean, imagenet.std) == (
        224,
        "resized",
        (0.485, 0.456, 0.406),
        (0.229, 0.224, 0.225),
    )
    assert imagenet.cosine_weight == 10


def test_the_hash_covers_what_is_computed_and_nothing_else():
    config = configure([given_on_the_command_line(method="lucir")]).config
    for name in ("threads", "devices", "nodes", "workers", "checkpoint_steps"):
        assert config.model_copy(update={name: 3}).hash() == config.hash(), name
    for name, value in {"lr": 0.3, "seed": 9, "distill": "none", "margin": 0.1, "precision": "bf16"}.items():
        assert config.model_copy(update={name: value}).hash() != config.hash(), name


def test_every_option_has_words_and_a_group():
    for method in METHODS.values():
        for group, options in groups_of_options(method.Config).items():
            assert group
            for name, info in options.items():
                assert info.description, name


# -- the options of distillations


def test_a_distillation_brings_its_options_along():
    found = configure([given_on_the_command_line(method="lucir", distill="geodesic", subspace_dim=9)])
    assert (found.config.subspace_dim, found.config.geodesic_weight, found.config.margin) == (9, 6.0, 0.5)
    assert found.origins["subspace_dim"] == "command line"
    assert found.origins["geodesic_weight"] == "default of geodesic"
    assert found.origins["margin"] == "default of lucir"
    plain = configure([given_on_the_command_line(method="finetune")]).config
    for kind in DISTILLATIONS.values():
        assert not set(kind.Options.model_fields) & set(type(plain).model_fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"method": "lucir", "subspace_dim": 64},
            "subspace_dim (command line): an option of the distillation geodesic, not of lucir with distill = cosine",
        ),
        (
            {"method": "lucir", "distill": "geodesic", "cosine_weight": 3.0},
            "cosine_weight (command line): an option of the distillation cosine, not of lucir with distill = geodesic",
        ),
        (
            {"method": "finetune", "temperature": 2.0},
            "temperature (command line): an option of the distillation lwf, not of finetune with distill = none",
        ),
        (
            {"method": "lucir", "lucir": {"subspace_dim": 64}},
            "subspace_dim (command line): an option of the distillation geodesic, not of lucir with distill = cosine",
        ),
        (
            {"distillation": {"geo": {}}},
            "distillation.geo (command line): no such distillation; lwf, cosine, geodesic are allowed",
        ),
        (
            {"distillation": {"geodesic": {"subspace_dims": 3}}},
            "subspace_dims (command line, table geodesic): no such option; did you mean subspace_dim?",
        ),
        (
            {"distillation": {"geodesic": {"temperature": 3.0}}},
            "temperature (command line, table geodesic): an option of the distillation lwf, not of geodesic",
        ),
        (
            {"distillation": {"lwf": 3}},
            "lwf = 3 in command line, table distillation: a table of options is allowed here",
        ),
    ],
)
def test_an_option_of_a_distillation_that_is_not_in_use_is_refused(values, message):
    with pytest.raises(ConfigError) as caught:
        configure([given_on_the_command_line(**values)])
    assert str(caught.value) == message


def test_tables_of_distillations_count_only_where_they_are_in_use(tmp_path):
    def found(weight: float, **given):
        file = tmp_path / "own.toml"
        file.write_text(f"[distillation.geodesic]\ngeodesic_weight = {weight}\n[distillation.lwf]\ntemperature = 3.0\n")
        return configure([*file_layers(file), given_on_the_command_line(method="lucir", **given)])

    used = found(2.5, distill="geodesic")
    assert used.config.geodesic_weight == 2.5
    assert used.origins["geodesic_weight"] == f"file {tmp_path / 'own.toml'}"
    assert used.config.hash() != found(2.0, distill="geodesic").config.hash()
    assert found(2.5).config.hash() == found(2.0).config.hash() == configure([Layer("no file", {})]).config.hash()
    assert not any("geodesic" in name for name in found(2.5).config.identity())
    assert found(2.5, distill="geodesic", geodesic_weight=7.0).config.geodesic_weight == 7.0
    # A method's own table may hold options of the distillation that it is used with.
    mine = configure([Layer("own", {"method": "lucir", "lucir": {"distill": "geodesic", "subspace_dim": 5}})])
    assert (mine.config.distill, mine.config.subspace_dim) == ("geodesic", 5)


# -- roles


def test_roles_are_declared_with_the_options():
    class Own(RunConfig):
        shape: int = option(3, "Method", "A shape.", in_model="fixed", base=True)
        color: int = option(3, "Method", "A color.", in_model="set", identity=False)

    more = {role: set(Own.having(role)) - set(RunConfig.having(role)) for role in ("identity", "base", "in_grid")}
    assert more == {"identity": {"shape"}, "base": {"shape"}, "in_grid": set()}
    assert set(Own.having("in_model", "fixed", "set")) - set(RunConfig.having("in_model", "fixed", "set")) == {
        "shape",
        "color",
    }
    assert "color" not in Own.having("in_model", "fixed", "kept")


def test_what_a_model_fixes_keeps_and_lets_a_step_set():
    kind = kinds().of("lucir", "geodesic")
    fixed, kept, free = (set(kind.having("in_model", value)) for value in ("fixed", "kept", "set"))
    assert {"network", "image_size", "mean", "std", "scale"} <= fixed
    assert {"exemplars", "margin", "subspace_dim", "center", "seed"} <= kept
    assert {"epochs", "lr", "batch_size", "threads"} <= free
    assert not any(role & other for role, other in ((fixed, kept), (kept, free), (fixed, free)))
    about_data = set(groups_of_options(RunConfig)["Data"])
    assert not (fixed | kept | free) & about_data


def test_what_only_says_how_and_where_decides_nothing_that_is_shared_or_compared():
    for name in METHODS:
        kind = METHODS[name].Config
        elsewhere = set(kind.model_fields) - set(kind.having("identity"))
        assert {"threads", "devices", "workers"} <= elsewhere
        assert not elsewhere & set(kind.having("base"))
        assert not elsewhere & set(kind.having("in_grid"))
        assert elsewhere <= set(groups_of_options(kind)["Machine"])
    assert set(RunConfig.having("repetition")) == {"data_dir", "seed"}
    assert {"distill", "exemplars", "phases"} <= set(RunConfig.having("in_grid"))


def test_a_restated_option_changes_its_default_alone():
    class Own(RunConfig):
        distill: str = restate("distill", "geodesic")

    ours, common = Own.model_fields["distill"], RunConfig.model_fields["distill"]
    assert ours.default == "geodesic"
    assert (ours.description, ours.json_schema_extra) == (common.description, common.json_schema_extra)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_restates_a_common_option_leaves_it_its_roles(name):
    for key, common in RunConfig.model_fields.items():
        ours, roles = (roles_of(info) for info in (METHODS[name].Config.model_fields[key], common))
        if (name, key) in {("analytic", "distill"), ("analytic", "seed")}:  # what was learned holds for these alone
            assert ours.pop("in_model") == "fixed"
            assert roles.pop("in_model") == "kept"
        assert ours == roles, key


# -- random keys, and what else the configuration promises


@given(st.integers(0, 2**62), st.lists(st.integers() | st.text(), max_size=4))
def test_derived_keys_are_stable_and_in_range(seed, keys):
    key = derive(seed, *keys)
    assert key == derive(seed, *keys)
    assert 0 <= key < 2**63


def test_derived_keys_differ_by_purpose_and_are_those_of_every_version():
    assert len({derive(1, "a"), derive(1, "b"), derive(2, "a"), derive(1, "a", 0)}) == 4
    assert derive(1, "batches", 0, "train") == 9103172288450888587  # pinned: runs of every version agree


def test_the_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().epochs = 3


def test_paths_survive_json():
    config = configure([given_on_the_command_line(method="lwf", data_dir="some/where")]).config
    assert config.data_dir == Path("some/where")
    assert config.identity()["data_dir"] == "some/where"
