"""Classifiers of aeon, trained on the windows that a comparison trains on.

minirocket      random convolutions and a ridge classifier
litetime        an ensemble of LITE, a small convolutional network; needs tensorflow
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from .windows import WindowSet

LITE_EPOCHS = 100


def _minirocket(seed: int) -> Any:
    from aeon.classification.convolution_based import MiniRocketClassifier

    return MiniRocketClassifier(random_state=seed, n_jobs=-1)


def _litetime(seed: int) -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from aeon.classification.deep_learning import LITETimeClassifier

    return LITETimeClassifier(n_classifiers=1, n_epochs=LITE_EPOCHS, batch_size=32, random_state=seed)


PEERS: dict[str, tuple[Callable[[int], Any], str]] = {  # how to make one, and what it needs
    "minirocket": (_minirocket, "the extra `bench` (pip install 'muonssm[bench]')"),
    "litetime": (_litetime, "the extra `bench` and tensorflow (pip install 'muonssm[bench]' tensorflow-cpu)"),
}


def predict_by_peer(name: str, train: WindowSet, test: WindowSet, seed: int) -> np.ndarray:
    """Train a peer on the training windows; return its classes of the test windows."""
    make, needs = PEERS[name]
    try:
        model = make(seed)
    except ImportError as error:
        raise ImportError(f"--against {name} needs {needs}: {error}") from error
    model.fit(train.x.mT.numpy(), train.y.numpy())
    return model.predict(test.x.mT.numpy())
