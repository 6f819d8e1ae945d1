"""Classifiers of features, one file each."""

from geodl.closed_form.fitted import LeftOut
from geodl.model.classifiers.ame import Ame
from geodl.model.classifiers.analytic import ClosedForm
from geodl.model.classifiers.base import (
    CLASSIFIERS,
    Adapted,
    Classifier,
    Scorer,
    Stored,
    default_classifier,
    fittable,
    is_oracle,
    levels_of,
    notes_on,
    register,
    titles,
)
from geodl.model.classifiers.cnn import Cnn
from geodl.model.classifiers.ncm import Ncm
from geodl.model.classifiers.nme import Nme

# In the order in which tables show them.
for _kind in (Cnn, Nme, Ame, Ncm, ClosedForm):
    register(_kind)

__all__ = [
    "CLASSIFIERS",
    "Adapted",
    "Ame",
    "Classifier",
    "ClosedForm",
    "Cnn",
    "LeftOut",
    "Ncm",
    "Nme",
    "Scorer",
    "Stored",
    "default_classifier",
    "fittable",
    "is_oracle",
    "levels_of",
    "notes_on",
    "register",
    "titles",
]
