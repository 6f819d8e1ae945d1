"""Collective operations: two processes compared with one."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.helpers.pairs import gradient

from geodl.core.ranks import Ranks, gather_rows, global_mean


def squares(values, group):
    return global_mean(values.square(), group)


def some(values, group):
    return global_mean(values, group, where=values.detach() > 1)


def _rank(rank, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    group = dist.group.WORLD
    ranks = Ranks(rank, 2)
    try:
        own = torch.arange(3.0) if rank == 0 else torch.arange(3.0, 5.0)
        buffers = [torch.full((2,), float(rank)), torch.full((1,), rank)]
        ranks.broadcast(buffers)
        counts = torch.tensor([rank + 1])
        outcome = {
            "mean": gradient(squares, own, group),
            "some": gradient(some, own, group),
            "nothing": gradient(global_mean, own[:0], group)[0],
            "none of them": gradient(some, own * 0, group)[0],
            "rows": gather_rows(own.unsqueeze(1), group),
            "any": [ranks.any(rank == 1), ranks.any(False)],
            "buffers": buffers,
            "sum": (ranks.add_up(counts, "cpu"), counts),
            "main": ranks.is_main_process,
        }
        ranks.barrier()
        torch.save(outcome, f"{results}.{rank}")
    finally:
        dist.destroy_process_group()


def test_two_ranks(tmp_path):
    mp.spawn(_rank, (tmp_path / "rendezvous", tmp_path / "result"), nprocs=2)
    outcomes = [torch.load(tmp_path / f"result.{rank}") for rank in range(2)]
    whole = torch.arange(5.0)
    for name, mean in (("mean", squares), ("some", some)):
        value, slope = gradient(mean, whole, None)
        # as data-parallel training does
        averaged = torch.cat([outcome[name][1] for outcome in outcomes]) / 2
        torch.testing.assert_close(averaged, slope)
        for outcome in outcomes:
            torch.testing.assert_close(outcome[name][0], value)
    for rank, outcome in enumerate(outcomes):
        assert outcome["nothing"] == outcome["none of them"] == 0
        assert outcome["rows"][0].equal(whole.unsqueeze(1))
        assert outcome["rows"][1] == (0, 3)[rank]
        assert outcome["any"] == [True, False]
        assert [buffer.tolist() for buffer in outcome["buffers"]] == [[0.0, 0.0], [0]]
        assert [tensor.tolist() for tensor in outcome["sum"]] == [[3], [rank + 1]]
        assert outcome["main"] == (rank == 0)


def test_sums_are_computed_on_the_given_device(monkeypatch):
    seen = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: seen.append(tensor.device.type))
    monkeypatch.setattr(Ranks, "group", object())
    with pytest.raises(NotImplementedError):  # from this device nothing comes back
        Ranks(0, 2).add_up(torch.ones(2), "meta")
    assert seen == ["meta"]


def test_a_single_process():
    ranks = Ranks()
    ranks.barrier()
    ranks.broadcast([torch.ones(2)])
    assert ranks.is_main_process
    assert ranks.any(True)
    assert ranks.add_up(torch.ones(2), "cpu").tolist() == [1, 1]
    assert not ranks.any(False)
    rows, start = gather_rows(torch.ones(2, 3), None)
    assert (rows.shape, start) == ((2, 3), 0)
    values = torch.tensor([1.0, 2.0, 6.0])
    assert global_mean(values) == 3
    assert global_mean(values, where=values > 1) == 4
    assert global_mean(values, where=values > 9) == global_mean(values[:0]) == 0
    assert global_mean(torch.ones(2, 3), where=torch.tensor([[True], [False]])) == 1
