"""Wrong labels are found by what the rest of the data says of an image."""

import torch

from geodl.closed_form.doubts import doubts, leave_out_suspects
from geodl.closed_form.dual import class_weights, kernels, solve_dual, targets_of


def clusters(classes: int, each: int, spread: float = 0.3):
    """Return random features h (N, 24) around a center a class, and labels (N,)."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(classes, 24, generator=generator)
    labels = torch.arange(classes).repeat_interleave(each)
    return (
        centers[labels] + spread * torch.randn(len(labels), 24, generator=generator)
    ).relu(), labels


def fitted(h, labels):
    kernel = kernels({"h": h}, {"h": h})["h"]
    targets = targets_of(labels, int(labels.max()) + 1)
    return solve_dual(kernel, targets, 0.1, h.shape[1], class_weights(labels)), kernel


def test_the_fit_without_suspects_is_the_one_that_never_saw_them():
    h, labels = clusters(3, 12)
    groups = torch.arange(len(labels))
    groups[5] = groups[6] = groups[4]  # one of the three is a suspect
    groups[10] = groups[9]
    fit, kernel = fitted(h, labels)
    gone = torch.tensor([4, 9, 20])
    found = leave_out_suspects(fit, gone, groups)
    ridge = (torch.linalg.inv(fit.inverse) - kernel).diagonal()
    for i in range(len(labels)):
        out = torch.isin(torch.arange(len(labels)), gone) | (groups == groups[i])
        rest = (~out).nonzero().squeeze(1)
        system = kernel[rest][:, rest] + torch.diag(ridge[rest])
        expected = kernel[i, rest] @ torch.linalg.solve(system, fit.targets[rest])
        torch.testing.assert_close(found[i], expected)


def test_wrong_labels_are_doubted_and_right_ones_are_not():
    h, right = clusters(4, 25)
    labels = right.clone()
    wrong = torch.tensor([3, 30, 31, 60, 99])
    labels[wrong] = (labels[wrong] + 1) % 4
    found = doubts(fitted(h, labels)[0], labels, torch.arange(len(labels)))
    assert sorted(found.rows.tolist()) == wrong.tolist()
    assert torch.equal(found.likely, right[found.rows])
    assert (found.confidences > 0.9).all()
    assert not len(doubts(fitted(h, right)[0], right, torch.arange(len(right))).rows)


def test_a_series_under_a_wrong_class_is_doubted_as_a_whole():
    h, right = clusters(4, 24)
    groups = torch.arange(len(right)) // 6
    labels = torch.where(groups == 9, 0, right)
    found = doubts(fitted(h, labels)[0], labels, groups)
    assert sorted(found.rows.tolist()) == list(range(54, 60))
    assert set(found.likely.tolist()) == {2}


def test_a_class_of_a_single_series_is_not_judged():
    h, labels = clusters(3, 6)
    assert not len(doubts(fitted(h, labels)[0], labels, labels).rows)
