"""`AeonClassifier`: `MuonSSMClassifier` with aeon's base class, for aeon's ensembles, pipelines and benchmarks.

    AeonClassifier(MuonSSMClassifier("mamba", epochs=20, random_state=0)).fit(X, y)

Needs aeon. Everything else of aeon and scikit-learn takes `MuonSSMClassifier` as it is.
"""

from __future__ import annotations

from typing import Any, ClassVar

try:
    from aeon.classification.base import BaseClassifier
except ImportError as error:
    raise ImportError("AeonClassifier needs aeon: pip install 'muonssm[bench]'") from error
import numpy as np
from sklearn.base import clone

from muonssm.models.classifier import MuonSSMClassifier


class AeonClassifier(BaseClassifier):
    """Train a clone of `classifier`; None is `MuonSSMClassifier()`.

    Attributes:
        classifier_: the trained clone.
    """

    _tags: ClassVar[dict[str, Any]] = {
        "X_inner_type": ["np-list", "numpy3D"],
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "algorithm_type": "deeplearning",
        "python_dependencies": "torch",
    }

    def __init__(self, classifier: MuonSSMClassifier | None = None) -> None:
        self.classifier = classifier
        super().__init__()

    def _fit(self, X: Any, y: np.ndarray) -> AeonClassifier:
        self.classifier_ = clone(MuonSSMClassifier() if self.classifier is None else self.classifier).fit(X, y)
        return self

    def _predict(self, X: Any) -> np.ndarray:
        return self.classifier_.predict(X)

    def _predict_proba(self, X: Any) -> np.ndarray:
        return self.classifier_.predict_proba(X)

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        """A small model for aeon's own checks."""
        small = MuonSSMClassifier("mamba", d_model=8, d_state=2, layers=1, epochs=2, random_state=0)
        return {"classifier": small}
