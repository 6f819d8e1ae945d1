"""Estimators for scikit-learn: the closed form on feature vectors, and features of images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geodl.closed_form.choices import choose, judged, temperature
from geodl.closed_form.dual import kernels, solve_dual, targets_of
from geodl.closed_form.expansion import selected
from geodl.closed_form.fitted import Fitted
from geodl.closed_form.kept_features import FEW, KeptFeatures, none_of, share_of_each
from geodl.closed_form.primal import Statistics
from geodl.closed_form.random_features import RandomFeatures
from geodl.closed_form.series import no_clues
from geodl.config import RunConfig
from geodl.core.errors import ConfigError, MissingExtraError
from geodl.data.batches import Transform, evaluation
from geodl.data.dataset import insist
from geodl.data.images import ArrayImages
from geodl.data.intake import as_images
from geodl.data.squares import sizes_of, squares
from geodl.model.features import features_of
from geodl.model.herding import first_of_each
from geodl.nets import Own, build_network, expected_images, reading_copy

try:
    from sklearn.base import (
        BaseEstimator,
        ClassifierMixin,
        ClassNamePrefixFeaturesOutMixin,
        TransformerMixin,
    )
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:

    class BaseEstimator:  # type: ignore[no-redef]
        """Replaces scikit-learn's class: the classes below can be imported, but not constructed."""

        def __new__(cls, *_: Any, **__: Any) -> Self:
            """Raise an error that names the extra to install."""
            raise MissingExtraError("sklearn", cls.__name__)

    ClassifierMixin = type("ClassifierMixin", (), {})
    TransformerMixin = type("TransformerMixin", (), {})
    ClassNamePrefixFeaturesOutMixin = type("ClassNamePrefixFeaturesOutMixin", (), {})

BLOCK = "x"
"""The name of the only block of features."""
CHUNK = 2048
"""Rows scored at a time."""
JUDGED = 512
"""With sums, the number of rows that leave-one-out validates, at least two of each class."""


@dataclass(frozen=True)
class _Sums:
    """The state for many rows: their sums, and a sample of them for leave-one-out."""

    expand: RandomFeatures
    statistics: Statistics
    gamma: float
    sample: KeptFeatures

    @property
    def classes(self) -> int:
        return len(self.statistics.counts)

    def plus(self, rows: KeptFeatures, classes: int) -> "_Sums":
        new = self.expand.sums([rows.z], rows.labels, classes)
        sample = _sampled(self.sample + rows, classes)
        return replace(self, statistics=self.statistics + new, sample=sample)

    def without(self, row: int) -> "_Sums":
        rest, sample = self.statistics.without(row), self.sample.without(row)
        return replace(self, statistics=rest, sample=sample)


class _Solved(NamedTuple):
    """A head (M, classes), its ridge, counts (classes,), and leave-one-out scores (n, classes) of rows with labels (n,)."""

    expand: RandomFeatures
    head: Tensor
    gamma: float
    counts: Tensor
    scores: Tensor
    labels: Tensor

    @property
    def accuracy(self) -> float:
        """The accuracy of leave-one-out, weighted by the sizes of the classes; nan without rows."""
        if not len(self.labels):
            return math.nan
        judged_of_each = torch.bincount(self.labels, minlength=len(self.counts))
        weights = (self.counts / judged_of_each)[self.labels]
        right = (self.scores.argmax(1) == self.labels) * weights
        return float(right.sum() / weights.sum())


class ClosedFormClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Ridge regression on random features, in closed form, as a scikit-learn classifier.

    ``--method analytic`` fits it to the features of a frozen network. Classes need not be known in advance:
    `partial_fit` adds rows of old and new classes. While there are no more rows than random features,
    all rows are kept, and the fit is the same as to all rows at once. With more rows, only sums are kept: the
    standardization and the ridge are then fixed, and the result does not depend on how further rows are divided.

    Features should have similar scales, such as those of a network: a feature that varies a
    thousand times less than the others counts as constant. Use ``StandardScaler`` otherwise.

    Args:
        expansion: the number of random features.
        gamma: ridge, relative to the mean square of a random feature; None: chosen by leave-one-out.
        random_state: seed of the random features.

    Attributes:
        classes_: the classes, sorted.
        class_count_: (classes,) the number of rows of each class.
        gamma_: the ridge in use.
        score_left_out_: leave-one-out accuracy: each row is predicted by the fit without it.
            Exact while rows are kept, else estimated on the first rows of each class, about 500 in
            total; nan for a single class.
    """

    def __init__(
        self, expansion: int = 4096, gamma: float | None = None, random_state: Any = 0
    ) -> None:
        self.expansion = expansion
        self.gamma = gamma
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to rows X: (N, d) with labels y: (N,)."""
        return self._learn(X, y, None)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Add rows X: (N, d) with labels y: (N,), of known or new classes.

        classes: ignored, for compatibility with other estimators.
        """
        return self._learn(X, y, getattr(self, "_state", None))

    def remove_class(self, label: Any) -> Self:
        """Remove a class: exactly while rows are kept; in sums, its rows still count, as rows of no class."""
        check_is_fitted(self)
        (rows,) = np.nonzero(self._learned == label)
        if not len(rows):
            known = ", ".join(map(str, self.classes_))
            raise ConfigError(f"class = {label!r}: allowed values are {known}")
        if len(self._learned) == 1:
            raise ConfigError(f"class = {label!r}: the only class cannot be removed")
        row = int(rows[0])
        self._commit(self._state.without(row), np.delete(self._learned, row), self._seed)
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return scores (N, classes); for two classes the difference (N,), above 0 for the second."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return probabilities (N, classes), calibrated by leave-one-out."""
        scores = torch.from_numpy(self._scores(X)) / self._fitted.temperature
        return scores.softmax(dim=1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most likely class of each row, (N,)."""
        columns = self._scores(X).argmax(1)
        predictions: NDArray[Any] = self.classes_[columns]
        return predictions

    def _learn(self, X: Any, y: Any, before: KeptFeatures | _Sums | None) -> Self:
        if not isinstance(self.expansion, int | np.integer) or self.expansion < 1:
            raise ConfigError(f"expansion = {self.expansion!r}: allowed values are integers from 1")
        kinds = [np.float64, np.float32]
        rows, labels = validate_data(self, X, y, reset=before is None, dtype=kinds)
        check_classification_targets(labels)
        learned = _joined(None if before is None else self._learned, labels)
        order = np.argsort(learned)
        numbers = order[np.searchsorted(learned, labels, sorter=order)]
        z = {BLOCK: torch.tensor(rows)}
        targets = torch.from_numpy(numbers)
        new = KeptFeatures(z, targets, no_clues(len(targets)), none_of(targets))
        if before is None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        else:
            seed = self._seed
        if isinstance(before, _Sums):
            return self._commit(before.plus(new, len(learned)), learned, seed)
        data = new if before is None else before + new
        if len(data.labels) <= self.expansion:
            return self._commit(data, learned, seed)
        return self._commit(_summed(data, self.expansion, self.gamma, seed), learned, seed)

    def _commit(self, state: KeptFeatures | _Sums, learned: NDArray[Any], seed: int) -> Self:
        """Fit, and set all attributes if that succeeds."""
        if isinstance(state, _Sums):
            solved = _solved_sums(state)
        else:
            solved = _solved_rows(state, len(learned), self.expansion, self.gamma, seed)
        order = np.argsort(learned)
        columns = torch.from_numpy(order)
        heat = temperature(solved.scores, solved.labels)
        self._state, self._learned, self._seed = state, learned, seed
        self._fitted = Fitted(solved.expand, solved.head[:, columns], heat)
        self.classes_ = learned[order]
        self.class_count_ = solved.counts[columns].numpy()
        self.gamma_, self.score_left_out_ = solved.gamma, solved.accuracy
        return self

    def _scores(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        rows = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        parts = torch.split(torch.tensor(rows), CHUNK)
        scores = torch.cat([self._fitted.scores({BLOCK: part}) for part in parts])
        return scores.double().numpy()


def _joined(known: NDArray[Any] | None, labels: NDArray[Any]) -> NDArray[Any]:
    """Return the classes in learning order: known ones first."""
    new = np.unique(labels)
    if known is None:
        return new
    if (known.dtype.kind in "OSU") != (new.dtype.kind in "OSU"):
        raise ConfigError(
            f"y: labels like {known[0]!r} were learned, {new[0]!r} is of another type"
        )
    return np.concatenate([known, new[~np.isin(new, known)]])


def _chosen_ridge(h: Tensor, kernel: Tensor, labels: Tensor) -> float:
    """Return the ridge chosen by leave-one-out. h: (n, M); kernel: (n, n), their products."""
    # Numbered without gaps, in case some class has no row here.
    numbers = torch.unique(labels, return_inverse=True)[1]
    return choose({BLOCK: kernel}, {BLOCK: h.shape[1]}, numbers, [[BLOCK]]).gamma


def _products(h: Tensor) -> Tensor:
    return kernels({BLOCK: h}, {BLOCK: h})[BLOCK]


def _solved_rows(
    data: KeptFeatures, classes: int, width: int, gamma: float | None, seed: int
) -> _Solved:
    """Fit to all rows (dual form)."""
    expand = RandomFeatures.of(data.z, width, seed)
    labels = data.labels
    h = expand(data.z)
    kernel = _products(h)
    if gamma is None:
        some = share_of_each(labels, FEW)
        gamma = _chosen_ridge(h, kernel[some][:, some], labels[some])
    dual = solve_dual(kernel, targets_of(labels, classes), gamma, width)
    counts = torch.bincount(labels, minlength=classes)
    known = judged(labels)
    scores = dual.leave_out()[known]
    return _Solved(expand, dual.head(h), gamma, counts, scores, labels[known])


def _summed(data: KeptFeatures, width: int, gamma: float | None, seed: int) -> _Sums:
    """Return the sums over rows, with the final standardization and ridge."""
    expand = RandomFeatures.of(data.z, width, seed)
    if gamma is None:
        some = share_of_each(data.labels, FEW)
        h = expand(selected(data.z, some))
        gamma = _chosen_ridge(h, _products(h), data.labels[some])
    classes = int(data.labels.max()) + 1
    total = expand.sums([data.z], data.labels, classes)
    return _Sums(expand, total, gamma, _sampled(data, classes))


def _sampled(rows: KeptFeatures, classes: int) -> KeptFeatures:
    """Return a few rows of each class."""
    return rows.select(first_of_each(rows.labels, max(2, JUDGED // classes)))


def _solved_sums(state: _Sums) -> _Solved:
    """Fit to the sums (primal form)."""
    statistics, sample = state.statistics, state.sample
    solved = statistics.solve(state.gamma)
    known = (statistics.counts[sample.labels] > 1) & (state.classes > 1)
    some = sample.select(known)
    h = state.expand(some.z)
    scores = solved.leave_one_out(h, targets_of(some.labels, state.classes))
    return _Solved(state.expand, solved.head, state.gamma, statistics.counts, scores, some.labels)


class ImageFeatures(
    ClassNamePrefixFeaturesOutMixin,  # type: ignore[misc]
    TransformerMixin,  # type: ignore[misc]
    BaseEstimator,  # type: ignore[misc]
):
    """Features of images under a frozen backbone, for a scikit-learn ``Pipeline``.

    Args:
        backbone: ``efficientnet-lite0``, ``efficientnet-lite2`` (extra ``pretrained``) and ``timm:NAME`` with their published
            weights, the name of another network with `weights`, or a torch module as it is.
        weights: a file with the backbone's weights (safetensors, .pth or .pt).
        levels: levels of the backbone whose features are joined, such as ``("stride16", "stride32@2")``;
            None: the pooled features of the last one.
        image_size: side of the images in pixels; None: as the backbone expects, or else that of
            the images passed to `fit`.
    """

    def __init__(
        self,
        backbone: str | Own = "efficientnet-lite0",
        weights: str | Path | None = None,
        levels: Sequence[str] | None = None,
        image_size: int | None = None,
    ) -> None:
        self.backbone = backbone
        self.weights = weights
        self.levels = levels
        self.image_size = image_size

    def fit(self, X: Any, y: Any = None) -> Self:
        """Build the network, without training. X: images, as for `transform`."""
        named = isinstance(self.backbone, str)
        network = build_network(
            self.backbone,
            1,
            head="linear",
            weights=None if self.weights is None else Path(self.weights),
            pretrained=named and self.weights is None,
        )
        expected = expected_images(self.backbone) if isinstance(self.backbone, str) else {}
        fields = RunConfig.model_fields
        self.transform_ = Transform(
            self.image_size or expected.get("image_size") or sizes_of(as_images(X)[0]).side,
            expected.get("mean", fields["mean"].default),
            expected.get("std", fields["std"].default),
        )
        for name in self.levels or ():
            network.level_and_cells(name)
        self.network_ = reading_copy(network, "cpu")
        side = self.transform_.shorter_side
        gray = torch.full((1, 3, side, side), 128, dtype=torch.uint8)
        example = self._features(ArrayImages(gray, torch.zeros(1, dtype=torch.int64)))
        self._n_features_out = example.shape[1]  # for get_feature_names_out
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return features (N, d) of images: files, folders, PIL images, or arrays (N, H, W, C).

        An unreadable image is an error.
        """
        check_is_fitted(self)
        images, names, skipped = as_images(X)
        insist(True, skipped)
        parts = []
        threads = torch.get_num_threads() + 1
        seen = self.transform_
        for _, pixels, bad in squares(images, seen.shorter_side, threads, seen.whole):
            insist(True, [(names[i], reason) for i, reason in bad])
            some = ArrayImages(pixels, torch.zeros(len(pixels), dtype=torch.int64))
            parts.append(self._features(some))
        return torch.cat(parts).numpy() if parts else np.empty((0, self._n_features_out), "f4")

    def _features(self, images: ArrayImages) -> Tensor:
        levels = tuple(self.levels or ())
        features = features_of(self.network_, evaluation(images, self.transform_), levels=levels)
        if not levels:
            return features.pooled
        return torch.cat([features.levels[name] for name in levels], dim=1)
