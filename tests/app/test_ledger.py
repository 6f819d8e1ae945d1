"""What is kept of each learned image is read only where its parts fit each other."""

import pytest
import torch

from geodl.app.ledger import Ledger


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keys", lambda x: x[1:]),
        ("likely", lambda x: torch.cat([x, x])),
        ("likely", lambda x: x + 3),
        ("labels", lambda x: x - 1),
        ("confirmed", lambda x: x.long()),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(name, change):
    ledger = Ledger.empty(3)
    tensors = ledger.to_tensors()
    again = Ledger.from_tensors(tensors, ledger.names, 2)
    assert (len(again), again.names) == (3, ledger.names)
    tensors[f"learned.{name}"] = change(tensors[f"learned.{name}"])
    with pytest.raises(ValueError, match=f"{name}|2 classes"):
        Ledger.from_tensors(tensors, ledger.names, 2)
