"""The runs of a sweep: grids, files, ranges; what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.command import geodl
from tests.helpers.runs import DIGITS, quick

from geodl.bench.sweep import jobs as jobs_module
from geodl.bench.sweep.jobs import Spec, bases_first, expand, parse_grid, read_spec
from geodl.cli import grids
from geodl.config import Layer, all_options, file_layers, preset_layer
from geodl.methods import configure


def test_a_grid_is_every_combination_with_the_hashes_of_single_runs(tmp_path):
    grid = parse_grid(["method=lucir,lucir+geodesic", "seed=1,2,3"])
    jobs = expand([preset_layer("digits")], Spec(grids=[grid]).points(1, 0), tmp_path)
    assert [job.label for job in jobs[:2]] == ["LUCIR, seed 1", "LUCIR, seed 2"]
    assert len({job.out for job in jobs}) == 6
    options = {"method": "lucir", "distill": "geodesic", "seed": 3}
    alone = configure([preset_layer("digits"), Layer("", options)]).config
    assert jobs[-1].out == tmp_path / f"digits-lucir-geodesic-{alone.hash()}"


def test_points_that_mean_the_same_run_are_one(tmp_path):
    assert len(quick(tmp_path, {"method": "lucir"}, {"method": "lucir+cosine"}, {"seed": 1})) == 1


def test_a_file_has_options_grids_and_ranges(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(
        'preset = "digits"\nepochs = 3\n[[grid]]\nmethod = ["icarl"]\nseed = [1, 2]\n'
        '[[grid]]\nmethod = ["lucir+geodesic"]\nmilestones = [[0.5], [0.3, 0.6]]\n[over]\nlr = "log:0.01:0.3"\n'
    )
    spec = read_spec(path)
    assert spec.count(trials=5) == 5 * (2 + 2)
    jobs = expand(spec.layers, spec.points(5, 1), tmp_path)
    assert len(jobs) == 20
    assert {job.config.milestones for job in jobs} == {(0.5, 0.75), (0.5,), (0.3, 0.6)}
    assert {job.config.epochs for job in jobs} == {3}


WORD = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@given(
    st.sampled_from("finetune lucir+geodesic bic icarl mnemonics analytic joint".split()),
    st.fixed_dictionaries(
        {},
        optional={
            "lr": st.floats(1e-9, 1e3),
            "order": st.lists(WORD, min_size=1, max_size=3),
            "weights": st.just('a "b"/c\\d.safetensors'),
            "milestones": st.just([0.25]),
            "flip": st.booleans(),
        },
    ),
)
def test_the_file_of_a_job_gives_its_very_configuration(tmp_path_factory, method, options):
    root = tmp_path_factory.getbasetemp()
    (job,) = expand([Layer("", options)], [{"method": method}], root)
    path = root / "job.toml"
    path.write_text(job.toml())
    again = configure(file_layers(path)).config
    assert again == job.config
    assert again.hash() == job.config.hash()


def test_no_option_can_be_unset_that_is_set_by_default():
    # TOML has no word for "unset": the file of a job leaves such options out.
    assert not [
        name
        for name, info in all_options().items()
        if info.default is not None and type(None) in getattr(info.annotation, "__args__", ())
    ]


SEARCH = "--search random --over"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--grid seeed=1,2", "seeed = '1' (sweep): no such option; did you mean seed?"),
        ("--grid seed=", "grid: seed = []"),
        ("--grid seed", "--grid seed: expected OPTION=A,B,..."),
        ("", "nothing to vary"),
        ("spec.toml", "spec.toml: No such file"),
        (
            "--grid seed=1 --grid phases=2,4",
            "phases = 4: allowed values for 6 classes after the base",
        ),
        ("--grid network=convnet,alexnet", "network = 'alexnet'"),
        ("--grid method=lucir+geodesic --grid distill=lwf", "method = lucir+geodesic: the distil"),
        ("--grid seed=1 -j 0", "jobs = 0"),
        ("--grid seed=1 -j 2 --ray auto", "--jobs, --ray and --submit"),
        ("--search random", "--search and --over belong together"),
        (f"{SEARCH} lr=log:0:1", "over: lr = log:0:1: expected LOW:HIGH"),
        (f"{SEARCH} lr=3:1", "over: lr = 3:1: expected LOW:HIGH"),
        (f"{SEARCH} epochs=1.2:1.8", "over: epochs = 1.2:1.8: the range contains no"),
        (f"{SEARCH} lr", "--over lr: expected OPTION=LOW:HIGH"),
        (f"{SEARCH} lr=1:2 --trials 0", "trials = 0"),
        ("--grid lr=1,2 --submit slurm --sbatch --comment='x", "sbatch = --comment='x: No closing"),
        ("--search asha --over lr=1:2 -j 2", "search = asha"),
        ("--grid devices=1,2", "devices (sweep): this option does not change the results"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, arguments, message):
    said = geodl("sweep", *arguments.split(), "--preset", "digits", cwd=tmp_path, status=2).stderr
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_very_many_runs_need_confirmation(tmp_path, monkeypatch):
    monkeypatch.setattr(grids.sys.stdin, "isatty", lambda: False, raising=False)
    grid = [f"{key}={','.join(map(str, range(1, 101)))}" for key in ("seed", "epochs")]
    said = geodl("sweep", "--grid", grid[0], "--grid", grid[1], cwd=tmp_path, status=2).stderr
    assert "10,000 runs" in said
    assert "--yes" in said
    assert len(said.splitlines()) == 1


def test_a_dry_run_lists_and_starts_nothing(tmp_path):
    said = geodl("sweep", *DIGITS, "--grid", "seed=1,2", "--dry-run", cwd=tmp_path).stdout
    assert said.count("(waiting; runs/digits-lucir-") == 2
    assert not (tmp_path / "runs").exists()


def test_different_base_phases_come_first(tmp_path):
    points = [
        {"method": method, "seed": seed}
        for seed in (1, 2)
        for method in ("lucir", "lucir+geodesic", "icarl", "bic")
    ]
    first = [f"{name}, seed {seed}" for seed in (1, 2) for name in ("LUCIR", "iCaRL", "BiC")]
    then = ["LUCIR + GeoDL, seed 1", "LUCIR + GeoDL, seed 2"]
    order = [job.label for job in bases_first(quick(tmp_path, *points))]
    assert order == first + then


def test_checks_are_made_once(tmp_path, monkeypatch):
    loaded = []
    load = jobs_module.load_data
    monkeypatch.setattr(
        jobs_module, "load_data", lambda config: loaded.append(config.data) or load(config)
    )
    points = [{"seed": seed, "phases": phases} for seed in range(3) for phases in (1, 2)]
    jobs_module.check(quick(tmp_path, *points))
    assert loaded == ["digits"]
