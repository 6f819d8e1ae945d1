"""Images of one series are found by where they come from and by their features, and left out together."""

import pytest
import torch

from geodl.closed_form.dual import class_weights, solve_dual, targets_of
from geodl.closed_form.series import ALIKE, NEXT, PAUSE, no_clues, runs_of, series_of

GIVEN, FOLDER, NAME, FRAME, TIME = range(5)
SIZES = (5, 5, 5)


def scenes(noise: float, sizes=SIZES, seed=0, width=400):
    """Return the features of frames of some scenes, and the scene of each."""
    generator = torch.Generator().manual_seed(seed)
    scene = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centers = torch.randn(len(sizes), width, generator=generator)
    z = centers[scene] + noise * torch.randn(len(scene), width, generator=generator)
    return {"top": z}, scene


def same(groups, scene) -> bool:
    """Return whether two ways of grouping are the same, whatever the numbers."""
    return torch.equal(groups[:, None] == groups, scene[:, None] == scene)


def clued(count: int, **columns) -> torch.Tensor:
    clues = no_clues(count)
    for name, values in columns.items():
        clues[:, "given folder name frame time".split().index(name)] = torch.as_tensor(values)
    return clues


def of_one_class(z, clues):
    return series_of(z, torch.zeros(len(clues), dtype=torch.int64), clues)


def alone(groups) -> bool:
    return len(groups.unique()) == len(groups)


def test_features_find_series_whose_names_tell_nothing():
    z, scene = scenes(0.3)
    assert same(of_one_class(z, no_clues(15)), scene)


def test_unlike_images_are_no_series():
    z, _ = scenes(1.0)
    assert alone(of_one_class(z, no_clues(15)))


@pytest.mark.parametrize("clue", ["name", "folder", "time"])
def test_names_folders_and_times_group_where_features_confirm_them(clue):
    z, scene = scenes(1.0)  # too unlike for features alone
    assert same(of_one_class(z, clued(15, **{clue: 1000 * scene})), scene)


@pytest.mark.parametrize("clue", ["name", "folder", "time"])
def test_features_that_contradict_them_win(clue):
    z, scene = scenes(1.0)
    mixed = torch.arange(15) % 3
    assert alone(of_one_class(z, clued(15, **{clue: 1000 * mixed})))
    assert not same(mixed, scene)


def test_one_stem_is_no_series_of_unlike_images():
    """As of image_0446.jpg and IMG_0001.jpg."""
    z, _ = scenes(1.5)
    assert alone(of_one_class(z, clued(15, name=7, frame=range(15))))


def test_a_film_of_one_stem_is_one_series():
    """Each frame is like the next one, the first is unlike the last."""
    drift = 0.65 * torch.randn(12, 4000, generator=torch.Generator().manual_seed(0)).cumsum(0)
    z = {"top": 0.3 * torch.randn(1, 4000, generator=torch.Generator().manual_seed(1)) + drift}
    cosines = torch.nn.functional.cosine_similarity(z["top"][1:], z["top"][:-1])
    assert NEXT < float(cosines.min()) < ALIKE
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    film = {"top": z["top"][order]}
    assert len(of_one_class(film, clued(12, name=7, frame=order)).unique()) == 1
    assert len(of_one_class(film, no_clues(12)).unique()) > 1


def test_a_series_that_is_given_holds_whatever_the_features_are():
    z, scene = scenes(0.3)
    mixed = torch.arange(15) % 3
    assert same(of_one_class(z, clued(15, given=mixed, name=scene)), mixed)
    assert alone(of_one_class(z, clued(15, given=range(15), name=scene)))


def test_no_series_spans_two_classes():
    z, scene = scenes(0.3)
    labels = torch.arange(15) % 2
    groups = series_of(z, labels, clued(15, given=5))
    assert same(groups, labels)
    assert same(series_of(z, labels, clued(15, name=scene)), 2 * scene + labels)


def test_a_pause_ends_a_run_of_pictures():
    times = torch.tensor([100, 100 + 2 * PAUSE, -1, 100 + PAUSE, 95 - PAUSE - 6])
    runs = runs_of(times)
    assert runs[0] == runs[1] == runs[3]
    assert runs[4] not in (runs[0], -1)
    assert runs[2] == -1


def test_how_much_one_more_series_helps_is_what_refitting_says():
    generator = torch.Generator().manual_seed(3)
    groups = torch.arange(9).repeat_interleave(4)
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])[groups]
    h = torch.randn(36, 30, generator=generator).double() + torch.eye(3, 30)[labels]
    targets, weights = targets_of(labels, 3), class_weights(labels)
    dual = solve_dual(h @ h.T, targets, 0.1, 30, weights)
    ridge = 0.1 * (weights * h.square().sum(1)).sum() / 30

    def right(series, *out):
        """Fit without some series by weighted least squares."""
        stay = ~torch.isin(groups, torch.tensor([series, *out]))
        gram = (weights[stay, None] * h[stay]).T @ h[stay] + ridge * torch.eye(30)
        head = torch.linalg.solve(gram, (weights[stay, None] * h[stay]).T @ targets[stay])
        rows = groups == series
        return ((h[rows] @ head).argmax(1) == labels[rows]).double()

    expected = torch.zeros(36, dtype=torch.float64)
    for series in range(9):
        others = (labels[::4] == labels[4 * series]).nonzero().squeeze(1).tolist()
        others.remove(series)
        n = len(others) + 1
        if n > 2:
            fewer = torch.stack([right(series, other) for other in others]).mean(0)
            expected[groups == series] = (n - 2) / n * (right(series) - fewer)
    assert expected.abs().max() > 0, "otherwise nothing is tested"
    torch.testing.assert_close(dual.gains(labels, groups), expected)
