"""Learning in closed form: features of a frozen network, a random expansion, ridge regression. Pure functions on tensors.

The features of an image are *blocks* z_b of width d_b (maps of several stages, pooled to a grid), standardized and expanded to
    ``h_b = ReLU(W_b z_b / sqrt(d_b))``,  W_b (M_b x d_b) standard normal, fixed by a seed;  h = (h_1, h_2, ...), M = sum M_b.
One-hot targets y are fitted by ridge regression without an intercept. Where only sums are kept (*primal* form):
    ``G = sum h h'``, ``C = sum h y'``,  ``head = (G + lambda I)^-1 C``,  ``lambda = gamma tr(G) / M``,  scores ``h' head``.
The sums do not know in which order or in which phases the images came, so neither does the head. Where the features of all
images are kept (*dual* form), with ``K = H H'`` (N x N) and a weight w_i for each image, all 1 unless classes are balanced:
    ``A = (K + lambda W^-1)^-1``,  ``a = A Y``,  ``head = H' a``,  ``lambda = gamma tr(W K) / M``.
What the fit without some image would say of it needs no second fit (`leave_one_out`, `leave_out`): blocks and gamma are
chosen, temperature and threshold fitted on that, never on test images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from geodl.config import derive
from geodl.errors import ConfigError, TrainingError
from geodl.geometry import working_dtype

Blocks = Mapping[str, Tensor]
"""Features of N images by the name of the block: (N, d_b) each."""

GAMMAS = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""What `choose` tries. On CIFAR-100 the first three are nearly the same; a few hundred photographs want about 0.1."""

_DEAD = 1e-3  # a coordinate that deviates by less than this share of its block's median would be magnified noise
_FAR = 6.0  # deviations: a coordinate that was hardly ever active in few images would outweigh all others when it is
_PANEL = 512  # columns of G computed in one product
_HALF = torch.finfo(torch.float16).max


def _check(x: Tensor, what: str) -> None:
    if not bool(x.isfinite().all()):
        raise TrainingError(f"nothing can be learned in closed form: {what} NaN or infinite values")


def kept(z: Blocks) -> dict[str, Tensor]:
    """Return features as they are stored, in float16; round before any use, so that all forms see the same numbers."""
    return {name: block.clamp(-_HALF, _HALF).half() for name, block in z.items()}


# ------------------------------------------------------------------------------------------------ from z to h


@dataclass(frozen=True)
class Standardization:
    """Mean and inverse deviation of every coordinate, by block: float32 (d_b,), the inverse 0 where a coordinate is dead."""

    mean: dict[str, Tensor]
    scale: dict[str, Tensor]

    @classmethod
    def of(cls, z: Blocks, total: Callable[[Tensor], Tensor] = lambda x: x) -> Standardization:
        """Measure features; `total` adds a tensor up over the processes, each of which has a share of the images."""
        mean, scale = {}, {}
        for name, block in z.items():
            _check(block, f"the features {name!r} have")
            rows = block.double()
            sums = total(torch.cat([rows.sum(0), rows.new_tensor([len(rows)])]))
            center = sums[:-1] / sums[-1].clamp(min=1)
            deviation = (total((rows - center).square().sum(0)) / sums[-1].clamp(min=1)).sqrt()
            alive = deviation > _DEAD * deviation.median()  # false too where every image has the same features
            mean[name] = center.float()
            scale[name] = torch.where(alive, 1 / deviation, 0.0).float()
        return cls(mean, scale)

    def __call__(self, z: Blocks) -> dict[str, Tensor]:
        """Return the blocks of z with mean 0 and deviation 1, cut off at 6 deviations, in float32 (float64 for float64)."""
        return {
            name: ((block.to(working_dtype(block)) - self.mean[name]) * self.scale[name]).clamp_(-_FAR, _FAR)
            for name, block in z.items()
            if name in self.mean
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all numbers as named tensors."""
        return {f"{part}.{name}": x for part in ("mean", "scale") for name, x in getattr(self, part).items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Standardization:
        """Undo `to_tensors`."""
        mean, scale = (
            {name.removeprefix(part): x for name, x in tensors.items() if name.startswith(part)}
            for part in ("mean.", "scale.")
        )
        return cls(mean, scale)


def share_out(total: int, widths: Mapping[str, int]) -> dict[str, int]:
    """Return how many of `total` expanded features each block gets, in proportion to its width; they add up to `total`."""
    ends, seen = {}, 0
    for name, width in widths.items():
        seen += width
        ends[name] = round(total * seen / sum(widths.values()))
    return {name: end - start for (name, end), start in zip(ends.items(), [0, *ends.values()], strict=False)}


@dataclass(frozen=True)
class Expansion:
    """A random layer for each block. sizes: the M_b by name; a block's weights depend on its name, its sizes and the seed alone.

    So an expansion of some of the blocks gives the columns that one of all blocks has for them.
    """

    sizes: Mapping[str, int]
    seed: int
    _weights: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def width(self) -> int:
        """M, the number of expanded features."""
        return sum(self.sizes.values())

    def weights(self, name: str, width: int) -> Tensor:
        """Return W_b' / sqrt(d_b): float32 (d_b, M_b). Drawn at the first use, stored nowhere."""
        if name not in self._weights:
            generator = torch.Generator().manual_seed(derive(self.seed, "expansion", name))
            # In float64: what is drawn in float32 differs in its last bits between processors.
            drawn = torch.randn(width, self.sizes[name], generator=generator, dtype=torch.float64)
            self._weights[name] = (drawn / math.sqrt(width)).float()
        return self._weights[name]

    def blocks(self, z: Blocks) -> dict[str, Tensor]:
        """Return h_b: (N, M_b) of the standardized z_b: (N, d_b)."""
        return {name: (z[name] @ self.weights(name, z[name].shape[1]).to(z[name])).relu_() for name in self.sizes}

    def __call__(self, z: Blocks) -> Tensor:
        """Return h: (N, M) of the standardized z."""
        return torch.cat(list(self.blocks(z).values()), dim=1)


# ------------------------------------------------------------------------------------------------- primal form


@dataclass
class Statistics:
    """What is kept of all images seen: G and C' as sums, in float64, and how many images each class had.

    upper:  (M, M), G on and right of the diagonal; what is left of it has no meaning.
    sums:   (classes, M), C': the sum of h of each class.
    counts: int64 (classes,).

    With several processes each adds its share of a phase's images to empty statistics; the three tensors are then summed
    over the processes, and the result added to what was there before. Every image counts the same: a class with many
    images is favored over one with few, and with sums alone that cannot be mended for classes that may grow later.
    """

    upper: Tensor
    sums: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, width: int, classes: int = 0, device: torch.device | str = "cpu") -> Statistics:
        """Return the statistics of no image, for `width` = M expanded features."""
        upper = torch.zeros(width, width, dtype=torch.float64, device=device)
        counts = torch.zeros(classes, dtype=torch.int64, device=device)
        return cls(upper, upper.new_zeros(classes, width), counts)

    def add(self, h: Tensor, labels: Tensor, classes: int) -> None:
        """Add images in place. h: (N, M), some hundred or thousand rows; labels: int64 (N,); classes: seen by now, N's included."""
        _check(h, "the features have")
        self._grow(classes)
        rows = h.double()
        for start in range(0, rows.shape[1], _PANEL):
            panel = slice(start, start + _PANEL)
            self.upper[panel, start:].addmm_(rows[:, panel].T, rows[:, start:])
        present = torch.bincount(labels).nonzero()  # so that the cost does not grow with the classes seen
        self.sums[present.squeeze(1)] += (present == labels).double() @ rows
        self.counts += torch.bincount(labels, minlength=len(self.counts))

    def __add__(self, other: Statistics) -> Statistics:
        result = Statistics(self.upper + other.upper, self.sums.clone(), self.counts.clone())
        result._grow(len(other.counts))
        result.sums[: len(other.sums)] += other.sums
        result.counts[: len(other.counts)] += other.counts
        return result

    def _grow(self, classes: int) -> None:
        """Give new classes their rows."""
        new = max(0, classes - len(self.counts))
        self.sums, self.counts = F.pad(self.sums, (0, 0, 0, new)), F.pad(self.counts, (0, new))

    def without(self, classes: Sequence[int]) -> Statistics:
        """Return the statistics less the given classes; the others move up.

        No image is given these labels any more. But G still holds their images, whose sum of h h' is not known by class: the
        head is the one that would come of having seen these images as none of the classes, not of never having seen
        them. Exact removal needs the features (dual form).
        """
        stay = torch.ones_like(self.counts, dtype=torch.bool)
        stay[list(classes)] = False
        return Statistics(self.upper.clone(), self.sums[stay], self.counts[stay])

    @property
    def gram(self) -> Tensor:
        """G: (M, M)."""
        return self.upper.triu().add_(self.upper.triu(1).T)

    def solve(self, gamma: float) -> Primal:
        """Fit the head."""
        return solve(self.gram, self.sums.T, gamma)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return what is stored: the triangle of G once, row by row, and C' in float32: 35 MB for M = 4096 and 100 classes."""
        triangle = torch.cat([row[i:].float() for i, row in enumerate(self.upper)])
        _check(triangle, "the sums of the features have, in float32,")
        return {"gram": triangle, "sums": self.sums.float(), "counts": self.counts.clone()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Statistics:
        """Rebuild the statistics that `to_tensors` gave."""
        sums = tensors["sums"].double()
        width = sums.shape[1]
        upper = sums.new_zeros(width, width)
        for i, row in enumerate(torch.split(tensors["gram"], list(range(width, 0, -1)))):
            upper[i, i:] = row
        return cls(upper, sums, tensors["counts"].clone())

    def rounded(self) -> Statistics:
        """Return the statistics as they will be read from a file: to be taken at the end of every phase, before solving."""
        return Statistics.from_tensors(self.to_tensors())


@dataclass(frozen=True)
class Primal:
    """A fitted head: float64 (M, classes), and the lower Cholesky factor of G + lambda I: (M, M)."""

    head: Tensor
    factor: Tensor

    def leave_one_out(self, h: Tensor, targets: Tensor) -> Tensor:
        """Return for images that G and C hold their scores (N, classes) by the fit without them, one at a time, lambda held fixed.

        h: (N, M); targets: float64 (N, classes). The score is y - (y - f) / (1 - h' (G + lambda I)^-1 h).
        """
        rows = h.double()
        whitened: Tensor = torch.linalg.solve_triangular(self.factor, rows.T, upper=False)
        return targets - (targets - rows @ self.head) / (1 - whitened.square().sum(0).unsqueeze(1))


def solve(gram: Tensor, cross: Tensor, gamma: float) -> Primal:
    """Fit the head (G + lambda I)^-1 C, lambda = gamma tr(G) / M. gram: float64 (M, M); cross: float64 (M, classes)."""
    factor = _cholesky(gram, _ridge(gram.trace(), gamma, len(gram)))
    return Primal(torch.cholesky_solve(cross, factor), factor)


def _ridge(trace: Tensor, gamma: float, width: int) -> Tensor:
    """Return lambda: (); where all features are 0 it is 1, as with any lambda above 0 the head is then 0."""
    if not 0 < gamma < math.inf:
        raise ConfigError(f"gamma = {gamma}: numbers above 0 are allowed")
    return torch.where(trace == 0, 1.0, gamma * trace / max(width, 1))


def _cholesky(matrix: Tensor, ridge: Tensor) -> Tensor:
    """Return the lower factor of a symmetric matrix with `ridge`, () or (n,), on its diagonal."""
    _check(matrix, "the products of the features have")
    ridged = matrix.clone()
    ridged.diagonal().add_(ridge)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(ridged)
    if int(info):
        raise TrainingError("the linear system is singular in double precision: a larger gamma is needed")
    return factor


# --------------------------------------------------------------------------------------------------- dual form


def class_weights(labels: Tensor) -> Tensor:
    """Return weights (N,) that give every class the same, 1 on average: N / (classes n_c). For a fit that favors no class."""
    counts = torch.bincount(labels).double()
    return len(labels) / ((counts > 0).sum() * counts[labels])


def targets_of(labels: Tensor, classes: int) -> Tensor:
    """Return one-hot targets, float64 (N, classes)."""
    return F.one_hot(labels, classes).double()


@dataclass(frozen=True)
class Dual:
    """A fit by its coefficients a: (N, classes) and A = (K + lambda W^-1)^-1: (N, N), to targets: (N, classes); all float64."""

    coefficients: Tensor
    inverse: Tensor
    targets: Tensor

    def head(self, h: Tensor) -> Tensor:
        """Return the head (M, classes) from the training images' h: (N, M)."""
        return h.double().T @ self.coefficients

    def leave_out(self, groups: Tensor | None = None, mirrored: Tensor | None = None) -> Tensor:
        """Return each training image's scores (N, classes) by the fit without it, or without its whole group.

        groups: int64 (N,), equal for near-duplicates; unset: every image is alone. mirrored: (N, N), products of the mirrored
        copies (rows) with the images (columns); where given, the scores are the mean of those of the image and of its copy.
        lambda, weights and standardization are held fixed.
        """
        gone = self.coefficients / self.inverse.diagonal().unsqueeze(1)  # (A_SS)^-1 a_S for a group S of one image
        repeated = _repeated(groups)
        for rows in repeated:
            gone[rows] = torch.linalg.solve(self.inverse[rows][:, rows], self.coefficients[rows])
        scores = self.targets - gone
        if mirrored is None:
            return scores
        lost = (mirrored * self.inverse).sum(1, keepdim=True) * gone
        for rows in repeated:
            lost[rows] = mirrored[rows] @ self.inverse[:, rows] @ gone[rows]
        return (scores + mirrored @ self.coefficients - lost) / 2


def _repeated(groups: Tensor | None) -> list[list[int]]:
    """Return the rows of every group of more than one image."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate([] if groups is None else groups.tolist()):
        members.setdefault(group, []).append(row)
    return [rows for rows in members.values() if len(rows) > 1]


def solve_dual(kernel: Tensor, targets: Tensor, gamma: float, width: int, weights: Tensor | None = None) -> Dual:
    """Fit in dual form. kernel: float64 (N, N), products of the h of all images; targets: (N, classes); width: M; weights: (N,)."""
    if weights is None:
        weights = kernel.new_ones(len(kernel))
    ridge = _ridge((weights * kernel.diagonal()).sum(), gamma, width)
    inverse = torch.cholesky_inverse(_cholesky(kernel, ridge / weights))
    return Dual(inverse @ targets, inverse, targets)


def kernels(h: Blocks, others: Blocks) -> dict[str, Tensor]:
    """Return the products of images' h with those of others, by block: float64 (N, others)."""
    return {name: block.double() @ others[name].double().T for name, block in h.items()}


# ----------------------------------------------------------------------------------------------- the fitted head


@dataclass(frozen=True)
class Fitted:
    """All that maps features to scores: standardization, expansion, head (M, classes) float32.

    temperature: of the softmax that makes confidences of the scores; threshold: of the largest score, below which an image
    is called unknown.
    """

    standardization: Standardization
    expansion: Expansion
    head: Tensor
    temperature: float
    threshold: float = -math.inf

    def scores(self, z: Blocks, chunk: int = 2048) -> Tensor:
        """Return the scores (N, classes) of features z: (N, d_b) by block, some images at a time."""
        count = len(next(iter(z.values())))
        some = [{name: z[name][start : start + chunk] for name in z} for start in range(0, count, chunk)]
        return torch.cat([self.head.new_empty(0, self.head.shape[1]), *map(self.scores_at_once, some)])

    def scores_at_once(self, z: Blocks) -> Tensor:
        """Return the scores (N, classes) without a loop over N, as a graph for any number of images needs it."""
        some = {name: z[name] for name in self.expansion.sizes}
        return self.expansion(self.standardization(some)) @ self.head

    def without(self, gone: int) -> Fitted:
        """Return the head without the column of a class."""
        return replace(self, head=torch.cat([self.head[:, :gone], self.head[:, gone + 1 :]], dim=1))

    def to_tensors(self) -> dict[str, Tensor]:
        """Return all numbers as named tensors; the expansion as its sizes, in the order of the blocks' names."""
        sizes = torch.tensor([self.expansion.sizes[name] for name in sorted(self.expansion.sizes)])
        numbers = torch.tensor([self.temperature, self.threshold], dtype=torch.float64)
        return self.standardization.to_tensors() | {"head": self.head, "numbers": numbers, "sizes": sizes}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], seed: int) -> Fitted:
        """Undo `to_tensors`; the expansion is drawn again from its seed."""
        standardization = Standardization.from_tensors(tensors)
        sizes = dict(zip(sorted(standardization.mean), tensors["sizes"].tolist(), strict=True))
        return cls(standardization, Expansion(sizes, seed), tensors["head"], *tensors["numbers"].tolist())


# ---------------------------------------------------------------------------------------- choices by leave-one-out


@dataclass(frozen=True)
class Choice:
    """Blocks and gamma, and the leave-one-out accuracy they were chosen for (NaN where no image could be judged)."""

    blocks: tuple[str, ...]
    gamma: float
    accuracy: float


def near_duplicates(z: Tensor, least: float = 0.96) -> Tensor:
    """Return groups, int64 (N,), equal for images of one series. z: (N, d), pooled features of the deepest level.

    Two images belong together where the cosine of their features is above `least`, and so do friends of friends.
    """
    rows = F.normalize(z.float(), dim=1)
    pairs = (rows @ rows.T > least).fill_diagonal_(True)
    groups = torch.arange(len(rows))
    for _ in range(len(rows)):  # the least number in the neighborhood spreads, at most along the longest series
        first = torch.where(pairs, groups, len(rows)).amin(1)
        if torch.equal(first, groups):
            break
        groups = first
    return groups


def judged(labels: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return which images (N,) leave-one-out can judge: those whose class has images outside their own group."""
    kin = labels.unsqueeze(1) == labels
    own = torch.eye(len(labels), dtype=torch.bool) if groups is None else groups.unsqueeze(1) == groups
    return (kin & ~own.to(kin.device)).any(1)


def choose(
    products: Blocks,
    widths: Mapping[str, int],
    labels: Tensor,
    subsets: Sequence[Sequence[str]],
    *,
    gammas: Sequence[float] = GAMMAS,
    balanced: bool = False,
    groups: Tensor | None = None,
    mirrored: Blocks | None = None,
    limit: int = 2000,
) -> Choice:
    """Return the likeliest blocks and gamma among those whose leave-one-out accuracy is within a standard error of the best.

    Args:
        products: of the training images' h with each other, by block, float64 (N, N).
        widths: M_b by block.
        labels: int64 (N,), 0 to classes - 1.
        subsets: the sets of blocks to try; the first is taken where no image can be judged.
        gammas: to try with each of them; the middle one is taken where no image can be judged.
        balanced: whether every class counts the same, in the fit (`class_weights`) and in the accuracy.
        groups: of near-duplicates, (N,).
        mirrored: products of the mirrored copies with the images, where prediction averages over both.
        limit: where there are more images, the first ones of each class, about this many in all, stand for the others.
    """
    rows = _first_of_each(labels, limit)
    labels, groups = labels[rows], None if groups is None else groups[rows]
    weights = class_weights(labels) if balanced else torch.ones_like(labels, dtype=torch.float64)
    targets, known = targets_of(labels, int(labels.max()) + 1), judged(labels, groups)
    if not known.any():
        return Choice(tuple(subsets[0]), gammas[len(gammas) // 2], math.nan)

    def summed(parts: Blocks, names: Sequence[str]) -> Tensor:
        return torch.stack([parts[name][rows][:, rows] for name in names]).sum(0)

    def quality(names: Sequence[str], gamma: float) -> tuple[float, float]:
        fit = solve_dual(summed(products, names), targets, gamma, sum(widths[name] for name in names), weights)
        scores = fit.leave_out(groups, None if mirrored is None else summed(mirrored, names))[known]
        right = (scores.argmax(1) == labels[known]) * weights[known]
        loss = F.cross_entropy(scores / temperature(scores, labels[known]), labels[known])
        return float(right.sum() / weights[known].sum()), float(loss)

    found = {(tuple(names), gamma): quality(names, gamma) for names in subsets for gamma in gammas}
    best = max(accuracy for accuracy, _ in found.values())
    error = math.sqrt(best * (1 - best) / int(known.sum()))
    good = {choice: loss for choice, (accuracy, loss) in found.items() if accuracy >= best - error}
    blocks, gamma = min(good, key=good.__getitem__)
    return Choice(blocks, gamma, found[blocks, gamma][0])


def _first_of_each(labels: Tensor, limit: int) -> Tensor:
    """Return the rows of the first limit / classes images of each class; all where there are no more than limit."""
    if len(labels) <= limit:
        return torch.arange(len(labels), device=labels.device)
    counts = torch.bincount(labels)
    ranks = torch.cat([torch.arange(count) for count in counts.tolist()]).to(labels.device)
    return labels.argsort(stable=True)[ranks < max(2, limit // int((counts > 0).sum()))]


def temperature(scores: Tensor, labels: Tensor) -> float:
    """Return the T of softmax(scores / T) with the largest likelihood. scores: (N, classes), leave-one-out; labels: (N,).

    The likelihood is concave in 1 / T: its slope is bisected. One image in N + 2 counts as of no class in particular, or
    scores that are always right would have the temperature 0.
    """
    spread = float((scores.amax(1) - scores.amin(1)).mean()) if len(scores) else 0.0
    if not spread > 0:
        return 1.0
    doubt = 1 / (len(labels) + 2)
    own = scores.gather(1, labels.unsqueeze(1)).mean() * (1 - doubt) + scores.mean() * doubt
    low, high = -14.0, 14.0  # log(spread / T)
    for _ in range(50):
        middle = (low + high) / 2
        expected = (F.softmax(scores * (math.exp(middle) / spread), dim=1) * scores).sum(1).mean()
        low, high = (middle, high) if expected < own else (low, middle)
    return spread / math.exp((low + high) / 2)


def threshold(confidences: Tensor, rate: float) -> float:
    """Return the confidence below which an image is called unknown, so that at most a share `rate` of the known ones are.

    confidences: (N,), leave-one-out; any measure that is larger for surer images. Without images nothing is unknown.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"rate = {rate}: from 0 to below 1 is allowed")
    if not len(confidences):
        return -math.inf
    return float(confidences.sort().values[int(rate * len(confidences))])
