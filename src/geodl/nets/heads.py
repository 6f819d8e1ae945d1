"""Classifier heads that grow: one row per class, in the order of learning.

While some rows are frozen, the parameter has only the trainable rows, and a buffer has the others: no optimizer can change
them, whatever its momentum or weight decay. `grow`, `imprint`, `freeze` and `thaw` replace the parameters: create the
optimizer after them.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geodl.core.errors import ConfigError


class Head(nn.Module):
    """Base class of heads: growing, freezing, and BiC's correction `alpha * logit + beta` of each class."""

    row_parameters: ClassVar[tuple[str, ...]] = ("weight",)
    weight: Tensor
    alpha: Tensor
    beta: Tensor
    order: Tensor | None

    def __init__(self, width: int, classes: int, *, seed: int = 0) -> None:
        super().__init__()
        self.width = width
        for name, rows in self._fresh_rows(0, torch.Generator()).items():
            self.register_parameter(name, nn.Parameter(rows))
            self.register_buffer(f"frozen_{name}", None)
        # While frozen: the position of row i in [trainable rows, frozen rows].
        self.register_buffer("order", None)
        self.register_buffer("alpha", torch.ones(0))
        self.register_buffer("beta", torch.zeros(0))
        self.grow(classes, seed)

    @property
    def classes(self) -> int:
        """The number of rows."""
        return len(self.alpha)

    @property
    def frozen(self) -> Tensor:
        """Which rows are frozen: (C,) bool."""
        if self.order is None:
            return torch.zeros_like(self.alpha, dtype=torch.bool)
        return self.order >= len(self.weight)

    def rows(self, name: str = "weight") -> Tensor:
        """Return all rows of a parameter, including frozen ones, in the order of the classes: (C, ...)."""
        trainable: Tensor = getattr(self, name)
        if self.order is None:
            return trainable
        return torch.cat([trainable, getattr(self, f"frozen_{name}")]).index_select(0, self.order)

    def raw(self, z: Tensor) -> Tensor:
        """Return the uncorrected logits (B, C) of features z: (B, d)."""
        raise NotImplementedError

    def forward(self, z: Tensor) -> Tensor:
        """Return the corrected logits (B, C) of features z: (B, d)."""
        return self.alpha * self.raw(z) + self.beta

    def grow(self, n: int, seed: int) -> None:
        """Append n random, trainable, uncorrected rows; frozen rows stay frozen."""
        frozen = self.frozen
        self.thaw()
        for name, fresh in self._fresh_rows(n, torch.Generator().manual_seed(seed)).items():
            self._set_rows(name, torch.cat([self.rows(name), fresh.to(self.weight)]))
        self.alpha = torch.cat([self.alpha, self.alpha.new_ones(n)])
        self.beta = torch.cat([self.beta, self.beta.new_zeros(n)])
        self.freeze(F.pad(frozen, (0, n)))

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order, and make them trainable."""
        self.thaw()
        index = torch.tensor(rows, dtype=torch.int64, device=self.alpha.device)
        for name in self.row_parameters:
            self._set_rows(name, self.rows(name)[index])
        self.alpha, self.beta = self.alpha[index], self.beta[index]

    def freeze(self, rows: Tensor) -> None:
        """Freeze the rows in a mask: (C,) bool, against gradient, momentum and weight decay; the others become trainable."""
        if rows.dtype != torch.bool or rows.shape != (self.classes,):
            actual = f"{tuple(rows.shape)} {rows.dtype}"
            raise ConfigError(
                f"rows to freeze: expected a mask ({self.classes},) torch.bool, got {actual}"
            )
        self.thaw()
        if not rows.any():
            return
        rows = rows.to(self.alpha.device)
        for name in self.row_parameters:
            full = self.rows(name).detach()
            setattr(self, f"frozen_{name}", full[rows])
            self._set_rows(name, full[~rows])
        # A stable sort of the mask puts the trainable rows first; the inverse permutation is the position of each class.
        self.order = torch.argsort(torch.argsort(rows.int(), stable=True))

    def thaw(self) -> None:
        """Make all rows trainable again, with their current values."""
        if self.order is None:
            return
        full = {name: self.rows(name) for name in self.row_parameters}
        self.order = None
        for name, rows in full.items():
            setattr(self, f"frozen_{name}", None)
            self._set_rows(name, rows)

    @torch.no_grad()
    def correct(self, rows: Sequence[int] | Tensor, alpha: Tensor, beta: Tensor) -> None:
        """Set the correction of some classes: `alpha * logit + beta` (BiC Eq. 5)."""
        index = torch.as_tensor(rows, device=self.alpha.device)
        self.alpha[index] = alpha.to(self.alpha)
        self.beta[index] = beta.to(self.beta)

    def _fresh_rows(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        # Rows of norm about 1, as imprinted rows have in a head without old rows.
        return {"weight": torch.randn(n, self.width, generator=generator) / self.width**0.5}

    def _set_rows(self, name: str, rows: Tensor) -> None:
        setattr(self, name, nn.Parameter(rows.detach()))


class CosineHead(Head):
    """`sigma * <z/|z|, w_c/|w_c|>`: the norm of a row does not matter (LUCIR Eq. 4)."""

    def __init__(self, width: int, classes: int, scale: float = 1.0, *, seed: int = 0) -> None:
        super().__init__(width, classes, seed=seed)
        self.scale = nn.Parameter(torch.tensor(float(scale)))

    def cosines(self, z: Tensor) -> Tensor:
        """Return the cosines (B, C) between features z: (B, d) and rows, before sigma and correction."""
        return F.linear(F.normalize(z, dim=1), F.normalize(self.rows(), dim=1))

    def raw(self, z: Tensor) -> Tensor:
        """Return the uncorrected logits (B, C) of features z: (B, d)."""
        return self.scale * self.cosines(z)

    @torch.no_grad()
    def imprint(self, rows: Sequence[int] | Tensor, means: Tensor) -> None:
        """Set k rows to class means: (k, d), each scaled to the mean norm of the other rows (1 without others)."""
        frozen = self.frozen
        self.thaw()
        index = torch.as_tensor(rows, device=self.weight.device)
        old = torch.ones_like(frozen).index_fill_(0, index, False)
        norm = self.weight[old].norm(dim=1).mean() if old.any() else 1.0
        self.weight[index] = norm * F.normalize(means.to(self.weight), dim=1)
        self.freeze(frozen)


class LinearHead(Head):
    """`<z, w_c> + b_c`."""

    row_parameters = ("weight", "bias")
    bias: Tensor

    def raw(self, z: Tensor) -> Tensor:
        """Return the uncorrected logits (B, C) of features z: (B, d)."""
        return F.linear(z, self.rows("weight"), self.rows("bias"))

    def _fresh_rows(self, n: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {**super()._fresh_rows(n, generator), "bias": torch.zeros(n)}
