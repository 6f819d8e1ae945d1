"""The class-incremental protocol: the order in which classes are learned, and their groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np

from geodl.core.errors import ConfigError, DataError
from geodl.data.dataset import Dataset, stratified
from geodl.data.images import Images, with_rows

ORDERS = ("lucir-1993", "icarl-1993", "natural", "seed")

# The order of iCaRL's and PODNet's experiments on 100 classes. Also called "seed 1993", but not the result of a NumPy shuffle.
_ICARL = """
87 0 52 58 44 91 68 97 51 15 94 92 10 72 49 78 61 14 8 86 84 96 18 24 32
45 88 11 4 67 69 66 77 47 79 93 29 50 57 83 17 81 41 12 37 59 25 20 80 73
1 28 6 46 62 82 53 9 31 75 38 63 33 74 27 22 36 3 16 21 60 19 70 90 89
43 5 42 65 76 40 30 23 85 2 95 56 48 71 64 98 13 99 7 34 55 54 26 35 39
"""

Classes = Sequence[str | int]


@dataclass(frozen=True)
class ScenarioPhase:
    """One phase: the names of its classes, their training images, and the test images of all classes seen so far."""

    index: int
    classes: tuple[str, ...]
    train: Images
    test: Images


class ClassIncremental:
    """A dataset whose classes arrive in groups: a base group first, then one group per phase.

    Iterate over it for its phases. The labels of its images are positions in the order of learning: 0 is the class learned
    first; `classes` has the names in this order.

    Args:
        data: the dataset.
        base: number of classes of phase 0; None: half of them; 0: as many as in the other phases.
        phases: number of equal groups after the base group; 0: one phase with all classes.
        groups: instead of base and phases: the sizes of the groups, or the classes of each group by name or by position
            in the dataset (this is then the order, too; other classes are left out).
        order: lucir-1993, icarl-1993 (100 classes), natural, seed, or the classes by name or position.
        seed: random seed of the order "seed".
        hold_out: share of each class's training images that are held out of all phases; `held_out` returns them.
        split_seed: random seed of the choice of these images.
    """

    def __init__(
        self,
        data: Dataset,
        base: int | None = None,
        phases: int = 5,
        *,
        groups: Sequence[Classes] | Sequence[int] | None = None,
        order: str | Classes = "lucir-1993",
        seed: int | None = None,
        hold_out: float = 0.0,
        split_seed: int = 0,
    ) -> None:
        if not isinstance(data, Dataset):
            kind = type(data).__name__
            raise DataError(f"data: expected a Dataset, got {kind}; geodl.load returns one")
        named = _named_groups(groups)
        if named is None:
            positions = class_order(order, data.classes, seed)
            sizes = _sizes(len(positions), base, phases, groups)
        elif order != "lucir-1993":
            raise ConfigError(f"order = {order!r}: not allowed with groups of named classes")
        else:
            positions = _positions([*chain(*named)], data.classes, "groups")
            sizes = [len(group) for group in named]
        bounds = [0, *accumulate(sizes)]
        self.data = data
        self.groups = tuple(tuple(range(a, b)) for a, b in pairwise(bounds))
        self.classes = tuple(data.classes[i] for i in positions)
        self._train = with_rows(data.train, self.classes)
        self._test = with_rows(data.test, self.classes)
        self._held_out: Images | None = None
        if hold_out:
            rest, held_out = stratified(self._train.labels, self.classes, hold_out, split_seed)
            self._train, self._held_out = self._train.select(rest), self._train.select(held_out)
        trained = set(self._train.labels.tolist())
        for label, name in enumerate(self.classes):
            if label not in trained:
                raise DataError(f"class {name!r} has no training images, at least one is needed")

    def __len__(self) -> int:
        """Return the number of phases, phase 0 included."""
        return len(self.groups)

    def __getitem__(self, phase: int) -> ScenarioPhase:
        names = tuple(self.classes[c] for c in self._group(phase))
        return ScenarioPhase(phase, names, self.train(phase), self.test(phase))

    def __iter__(self) -> Iterator[ScenarioPhase]:
        return (self[phase] for phase in range(len(self)))

    def train(self, phase: int) -> Images:
        """Return the training images of the classes that arrive in this phase."""
        group = self._group(phase)
        labels = self._train.labels
        return self._train.select((labels >= group[0]) & (labels <= group[-1]))

    def test(self, phase: int) -> Images:
        """Return the test images of all classes seen up to and including this phase."""
        return self._seen(self._test, phase)

    def held_out(self, phase: int) -> Images | None:
        """Return the held-out images of all classes seen up to and including this phase; None without `hold_out`."""
        return None if self._held_out is None else self._seen(self._held_out, phase)

    def _seen(self, images: Images, phase: int) -> Images:
        return images.select((images.labels >= 0) & (images.labels < self.seen(phase)))

    def seen(self, phase: int) -> int:
        """Return the number of classes seen up to and including this phase."""
        return self._group(phase)[-1] + 1

    def _group(self, phase: int) -> tuple[int, ...]:
        if not 0 <= phase < len(self):
            raise IndexError(f"phase {phase}: allowed are 0 to {len(self) - 1}")
        return self.groups[phase]


def class_order(order: str | Classes, classes: Sequence[str], seed: int | None = None) -> list[int]:
    """Return the positions of the classes in the dataset, in the order of learning."""
    if not isinstance(order, str):
        return _positions(order, classes, "order")
    if order not in ORDERS:
        raise ConfigError(f"order = {order!r}: allowed values are {', '.join(ORDERS)}, or a list")
    if (seed is None) == (order == "seed"):
        raise ConfigError(f"seed = {seed}, order = {order!r}: a seed belongs to order = 'seed'")
    if order == "natural":
        return list(range(len(classes)))
    if order == "icarl-1993":
        positions = [int(number) for number in _ICARL.split()]
        if len(classes) != len(positions):
            raise ConfigError(
                f"order = {order!r}: needs 100 classes, the dataset has {len(classes)}"
            )
        return positions
    shuffled = np.arange(len(classes))
    np.random.RandomState(1993 if seed is None else seed).shuffle(shuffled)
    return [int(i) for i in shuffled]


def _positions(chosen: Classes, classes: Sequence[str], key: str) -> list[int]:
    """Return the positions of classes given by name or position, which must exist and be different."""
    by_name = {name: i for i, name in enumerate(classes)}
    positions: list[int] = []
    for item in chosen:
        position = by_name.get(item, -1) if isinstance(item, str) else int(item)
        if not 0 <= position < len(classes):
            allowed = f"the names or positions of the {len(classes)} classes"
            raise ConfigError(f"{key}: no class {item!r}; allowed are {allowed}")
        if position in positions:
            raise ConfigError(f"{key}: class {item!r} is given twice")
        positions.append(position)
    if not positions:
        raise ConfigError(f"{key}: at least one class is needed")
    return positions


def _sizes(
    classes: int, base: int | None, phases: int, groups: Sequence[Classes] | Sequence[int] | None
) -> list[int]:
    """Return the sizes of the groups: those given, or a base group and equal groups."""
    if groups is not None:
        sizes = [int(size) for size in groups]  # type: ignore[arg-type]  # none is named
        if min(sizes) < 1 or sum(sizes) != classes:
            raise ConfigError(
                f"groups = {sizes}: allowed values are sizes from 1 with sum {classes}"
            )
        return sizes
    if not phases:
        return [classes]
    base = classes // 2 if base is None else base
    if not 0 <= base < classes:
        raise ConfigError(
            f"base = {base}: allowed values are 0 to {classes - 1} of the {classes} classes"
        )
    rest = classes - base
    divisors = [n for n in range(1, rest + 1) if rest % n == 0]
    if phases not in divisors:
        allowed = ", ".join(map(str, divisors))
        raise ConfigError(
            f"phases = {phases}: allowed values for {rest} classes after the base are {allowed}"
        )
    return [base] * (base > 0) + [rest // phases] * phases


def _named_groups(groups: Sequence[Classes] | Sequence[int] | None) -> list[Classes] | None:
    """Return the groups if they list classes; None if they are sizes or not given."""
    if groups is None:
        return None
    named = [group for group in groups if not isinstance(group, int | np.integer)]
    bad = any(isinstance(group, str) or len(group) == 0 for group in named)
    if bad or not groups or len(named) not in (0, len(groups)):
        raise ConfigError(f"groups = {groups!r}: allowed values are sizes, or lists of classes")
    return named or None
