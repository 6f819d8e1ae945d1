"""All losses: stable whatever the features, found by name, the same on several ranks."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.helpers.pairs import gradient, pair
from torch.nn.functional import cosine_similarity
from torch.utils._python_dispatch import TorchDispatchMode

from geodl import losses
from geodl.core.errors import GeodlError
from geodl.core.ranks import global_mean
from geodl.losses import (
    DISTILLATIONS,
    CosineDistillation,
    GeodesicDistillation,
    LogitDistillation,
    margin_ranking,
    register,
)

every_loss = pytest.mark.parametrize(
    "loss",
    [GeodesicDistillation(), CosineDistillation(), LogitDistillation()],
    ids=lambda loss: loss.name,
)


def batches():
    student, teacher = pair(12, 20, dtype=torch.float32)
    low = student[:, :3] @ student[:3]
    yield "one row", student[:1], teacher[:1]
    yield "two rows", student[:2], teacher[:2]
    yield "rank 3", low, teacher
    yield "both rank 3", low, low + 0.1
    yield "constant student", torch.full_like(student, 0.1), teacher
    yield "constant both", torch.full_like(student, 0.1), torch.full_like(student, 7.0)
    yield "zero student", torch.zeros_like(student), teacher
    yield "zero both", torch.zeros_like(student), torch.zeros_like(student)
    yield (
        "zero rows",
        student * (torch.arange(12) > 4)[:, None],
        teacher * (torch.arange(12) > 6)[:, None],
    )
    yield "duplicate rows", student[[0, 0, 0, 1, 1, 2]], teacher[[0, 0, 0, 1, 1, 2]]
    yield "teacher == student", teacher, teacher
    yield "teacher == -student", -teacher, teacher
    yield "tiny", student * 1e-20, teacher * 1e-20
    yield "huge", student * 1e18, teacher * 1e18
    yield (
        "of all sizes",
        student * torch.logspace(-20, 18, 12)[:, None],
        teacher * torch.logspace(18, -20, 12)[:, None],
    )
    yield "subnormal rows", student * torch.logspace(-44, 0, 12)[:, None], teacher
    yield "more rows than d", student[:, :4], teacher[:, :4]
    yield "one feature", student[:, :1], teacher[:, :1]
    yield "not contiguous", student.T.contiguous().T[::2], teacher[::2]
    yield "nearly constant", 1 + 1e-7 * student, 1 + 1e-7 * teacher
    yield "no rows", student[:0], teacher[:0]


@pytest.mark.parametrize(
    ("student", "teacher"), [pytest.param(s, t, id=name) for name, s, t in batches()]
)
@pytest.mark.parametrize("through_flow", [False, True])
@pytest.mark.parametrize("dim", [127, 2])
def test_loss_and_gradient_are_finite(student, teacher, through_flow, dim):
    loss = GeodesicDistillation(dim, through_flow)
    for dtype in (torch.float32, torch.float64):
        value, slope = gradient(loss, student.to(dtype), teacher.to(dtype))
        assert value.isfinite()
        assert -1e-6 <= value.item() <= 2 + 1e-6
        assert slope.isfinite().all()
    for loss in (CosineDistillation(), LogitDistillation()):
        value, slope = gradient(loss, student, teacher)
        assert value.isfinite()
        assert slope.isfinite().all()


def test_identical_batches_have_no_loss():
    for batch in (2, 12, 30):
        _, teacher = pair(batch, 20, dtype=torch.float32)
        value, slope = gradient(GeodesicDistillation(), teacher, teacher)
        assert abs(value.item()) < 1e-6
        assert slope.abs().max() < 1e-6


def test_one_row_has_no_subspace_and_no_loss():
    value, slope = gradient(GeodesicDistillation(), torch.ones(1, 4), -torch.ones(1, 4))
    assert value.item() == 0
    assert (slope == 0).all()


class Waits(TorchDispatchMode):
    """Finds where a GPU would be waited for: values that are read back, and shapes that depend on them."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = str(operation)
        waits = ("_local_scalar_dense", "nonzero", "masked_select")
        assert not any(word in name for word in waits), name
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "loss",
    [
        GeodesicDistillation(4),
        GeodesicDistillation(9, True),
        CosineDistillation(),
        LogitDistillation(),
    ],
)
def test_nothing_is_read_back_from_the_device(loss):
    student, teacher = pair(8, 12, dtype=torch.float32)
    with Waits():
        gradient(loss, student, teacher)
        hinges, counted = margin_ranking(student, torch.tensor([0, 11, 3, 0, 1, 5, 6, 7]), old=6)
        global_mean(hinges, where=counted)
    with Waits(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        student.sum().item()


def test_one_minus_cosine_and_its_derivatives():
    inputs = [z.requires_grad_() for z in pair(4, 5)]
    expected = 1 - cosine_similarity(*inputs)
    torch.testing.assert_close(losses.one_minus_cosine(*inputs), expected)
    assert torch.autograd.gradcheck(losses.one_minus_cosine, inputs)
    assert torch.autograd.gradgradcheck(losses.one_minus_cosine, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("through_flow", [False, True])
def test_half_precision_and_autocast(dtype, through_flow):
    student, teacher = pair(16, 24, dtype=dtype)
    for loss in (
        GeodesicDistillation(through_flow=through_flow),
        CosineDistillation(),
        LogitDistillation(),
    ):
        exact, exact_slope = gradient(loss, student.double(), teacher.double())
        value, slope = gradient(loss, student, teacher, autocast=True)
        mixed, _ = gradient(loss, student.float(), teacher, autocast=True)
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(exact.item(), rel=1e-5)
        assert mixed.item() == pytest.approx(exact.item(), rel=1e-5)
        assert slope.dtype == dtype
        torch.testing.assert_close(slope.double(), exact_slope, rtol=2e-2, atol=1e-6)


@every_loss
def test_input_that_is_not_finite_gives_such_a_loss(loss):
    for rows in (4, 1):
        student, teacher = pair(rows, 6, dtype=torch.float32)
        for bad in (math.nan, math.inf, -math.inf):
            broken = student.clone()
            broken[-1, 3] = bad
            assert not loss(broken, teacher).isfinite()
            assert not loss(student, broken).isfinite()


@every_loss
def test_shapes_that_do_not_fit_are_one_clear_error(loss):
    student, teacher = pair(4, 6, dtype=torch.float32)
    with pytest.raises(GeodlError, match=r"\(4, 6\) and \(4, 5\)"):
        loss(student, teacher[:, :5])
    with pytest.raises(ValueError, match=r"\(6,\) and \(6,\)"):
        loss(student[0], teacher[0])


# ---- the other losses


def test_cosine_distillation_is_the_mean_of_one_minus_cosine():
    student, teacher = pair(7, 5, dtype=torch.float32)
    expected = (1 - cosine_similarity(student.double(), teacher.double())).mean()
    value = CosineDistillation()(student, teacher)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    student[0] = 0  # a row without a direction counts nothing
    value, slope = gradient(CosineDistillation(), student, teacher)
    expected = (1 - cosine_similarity(student[1:].double(), teacher[1:].double())).sum() / 7
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (slope[0] == 0).all()


def test_logit_distillation_is_the_divergence_of_the_classes():
    student = torch.tensor([[math.log(4.0), 0.0], [0.0, 0.0]])
    teacher = torch.tensor([[0.0, 0.0], [math.log(16.0), 0.0]])
    # At temperature 2: (2/3, 1/3) and (1/2, 1/2) from teachers (1/2, 1/2) and (4/5, 1/5).
    first = 0.5 * math.log(0.5 / (2 / 3)) + 0.5 * math.log(0.5 / (1 / 3))
    second = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    found = LogitDistillation()(student, teacher).item()
    assert found == pytest.approx((first + second) / 2, rel=1e-6)
    assert LogitDistillation(1.0)(teacher, teacher).item() == pytest.approx(0, abs=1e-7)
    inputs = [z.double().requires_grad_() for z in (student, teacher)]
    assert torch.autograd.gradcheck(LogitDistillation(), inputs)


def test_margin_ranking_by_hand():
    cosines = torch.tensor(
        [
            [0.9, 0.8, 0.1, 0.7, 0.6],  # old class 0: hard new classes are 3 and 4
            [0.2, 0.1, 0.9, 0.9, 0.9],  # a new class: does not count
            [0.9, 0.3, 0.0, 0.2, -0.5],  # old class 1; class 0 is old and no rival
        ]
    )
    hinges, counted = margin_ranking(cosines, torch.tensor([0, 2, 1]), old=2)
    assert counted.tolist() == [[True], [False], [True]]
    torch.testing.assert_close(hinges[[0, 2]], torch.tensor([[0.3, 0.2], [0.4, 0.2]]))
    assert global_mean(hinges, where=counted).item() == pytest.approx(1.1 / 4)
    narrow, _ = margin_ranking(cosines, torch.tensor([0, 2, 1]), old=2, margin=0.2, top=1)
    torch.testing.assert_close(narrow[[0, 2]], torch.tensor([[0.0], [0.1]]))


def test_margin_ranking_with_a_single_new_class_and_without_old_samples():
    cosines = torch.tensor([[0.5, 0.4], [0.1, 0.9]], requires_grad=True)
    hinges, counted = margin_ranking(cosines, torch.tensor([0, 1]), old=1)
    assert hinges.shape == (2, 1)
    assert global_mean(hinges, where=counted).item() == pytest.approx(0.4)
    hinges, counted = margin_ranking(cosines, torch.tensor([1, 1]), old=1)
    mean = global_mean(hinges, where=counted)
    assert mean.item() == 0
    assert torch.autograd.grad(mean, cosines)[0].abs().max() == 0


# ---- distillations by name


def outputs(seed):
    rng = torch.Generator().manual_seed(seed)
    widths = {"logits": 5, "pooled": 4, "grid": 16}
    return SimpleNamespace(**{name: torch.randn(6, d, generator=rng) for name, d in widths.items()})


def test_each_distillation_is_built_from_its_own_options():
    assert list(DISTILLATIONS) == ["lwf", "cosine", "geodesic"]
    for name, kind in DISTILLATIONS.items():
        assert kind.name == name
        assert kind.of_features == (name != "lwf")
    built = {name: kind.build(kind.Options()) for name, kind in DISTILLATIONS.items()}
    weights = {name: loss.weight(50, 10) for name, loss in built.items()}
    assert weights == {"lwf": 1.0, "cosine": 5 * math.sqrt(5), "geodesic": 6 * math.sqrt(5)}
    assert CosineDistillation().weight(9, 0) == 5 * 3  # no new class
    given = {"subspace_dim": 3, "through_flow": True, "center": False}
    options = GeodesicDistillation.Options(geodesic_weight=2, geodesic_distance="squared", **given)
    built = GeodesicDistillation.build(options)
    assert (built.dim, built.through_flow, built.center) == (3, True, False)
    assert (built.distance, built.weight(4, 1)) == ("squared", 4)
    built = LogitDistillation.build(LogitDistillation.Options(temperature=3, lwf_weight=7))
    assert (built.temperature, built.weight(50, 10)) == (3, 7)
    with pytest.raises(GeodlError, match="temperature = 0"):
        LogitDistillation(temperature=0)


@pytest.mark.parametrize("name", ["cosine", "geodesic"])
@pytest.mark.parametrize(
    ("factor", "expected"), [("old/new", 2.5), ("new/old", 0.4), ("none", 1.0)]
)
def test_the_weight_of_features_has_the_chosen_factor(name, factor, expected):
    kind = DISTILLATIONS[name]
    built = kind.build(kind.Options(**{f"{name}_weight": 3.0, "weight_factor": factor}))
    assert built.weight(50, 8) == pytest.approx(3 * expected)  # 50 / 8 = 2.5 squared


def test_geodesic_on_pooled_features_is_the_cosine_loss_of_them():
    one, two = outputs(0), outputs(1)
    geodesic = GeodesicDistillation.build(GeodesicDistillation.Options(geodesic_features="pooled"))
    rows = [geodesic.compared(each, 3) for each in (one, two)]
    assert all(row is each.pooled for row, each in zip(rows, (one, two), strict=True))
    # Six rows of width 4 span everything, so that the kernel is the identity.
    expected = 1 - cosine_similarity(one.pooled, two.pooled).mean()
    torch.testing.assert_close(geodesic(*rows), expected)


def test_what_is_compared():
    one = outputs(0)
    assert LogitDistillation().compared(one, 3).equal(one.logits[:, :3])
    assert CosineDistillation().compared(one, 3) is one.pooled
    on_grid = CosineDistillation.build(CosineDistillation.Options(cosine_features="grid"))
    assert on_grid.compared(one, 3) is one.grid
    assert GeodesicDistillation().compared(one, 3) is one.grid


@pytest.mark.parametrize("name", ["cosine", "none"])
def test_a_name_is_taken_once(name):
    with pytest.raises(GeodlError, match=f"'{name}'.* already"):
        register(type("Another", (CosineDistillation,), {"name": name}))
    assert DISTILLATIONS["cosine"] is CosineDistillation


# ---- data-parallel

CASES = {
    "constant flow": partial(GeodesicDistillation, 9),
    "through the flow": partial(GeodesicDistillation, 9, True),
    "few directions": partial(GeodesicDistillation, 4, True),
    "cosine": CosineDistillation,
    "logits": LogitDistillation,
}
SPLITS = ((5, 5), (7, 3), (10, 0))


def whole_batch():
    return pair(10, 14, seed=12, dtype=torch.float32)


def _rank(rank, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    group, outcome = dist.group.WORLD, {}
    try:
        for sizes in SPLITS:
            student, teacher = (torch.split(z, sizes)[rank] for z in whole_batch())
            for name, make in CASES.items():
                outcome[sizes, name] = gradient(make(group=group), student, teacher)
                assert make(group=group)(student.bfloat16(), teacher).isfinite()
        broken = torch.full((2, 3), math.nan if rank else 1.0)
        for make in CASES.values():  # every rank sees what one of them has
            assert make(group=group)(broken, torch.ones(2, 3)).isnan()
        torch.save(outcome, f"{results}.{rank}")
    finally:
        dist.destroy_process_group()


def test_two_ranks_compute_what_one_would(tmp_path):
    mp.spawn(_rank, (tmp_path / "rendezvous", tmp_path / "result"), nprocs=2)
    ranks = [torch.load(tmp_path / f"result.{rank}") for rank in range(2)]
    for name, make in CASES.items():
        value, slope = gradient(make(), *whole_batch())
        for sizes in SPLITS:
            # what data-parallel training does
            averaged = torch.cat([outcome[sizes, name][1] for outcome in ranks]) / 2
            for outcome in ranks:
                torch.testing.assert_close(outcome[sizes, name][0], value, rtol=1e-5, atol=1e-7)
            largest = slope.abs().max().item()
            torch.testing.assert_close(averaged, slope, rtol=1e-5, atol=1e-5 * largest)
