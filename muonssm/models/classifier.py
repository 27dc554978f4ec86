"""`MuonSSMClassifier`: the activity model as a scikit-learn estimator, trained as in the paper (appendix B.4).

    classifier = MuonSSMClassifier("longhorn", epochs=20, random_state=0).fit(X, y)
    classifier.predict(X_new), classifier.score(X_test, y_test)

    X   `[n, channels, length]`; `[n, length]` is one channel; a list of `[channels, length_i]` for unequal lengths
    y   `[n]`, any labels

Needs scikit-learn, which the extra `activity` installs, and nothing of `muonssm.lab`.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from muonssm.checks import check_bool, check_int, check_number
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig
from muonssm.ops import Muon

try:
    import numpy as np
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.model_selection import train_test_split
    from sklearn.utils import assert_all_finite, check_random_state, compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError("MuonSSMClassifier needs scikit-learn: pip install 'muonssm[activity]'") from error

PREDICTION_BATCH = 256
CLIP = 1.0  # largest gradient norm
SIZES = ("backbone", "d_model", "d_state", "expand", "layers", "dropout", "momentum", "bidirectional")


class MuonSSMClassifier(ClassifierMixin, BaseEstimator):
    """Classify multichannel series with a state space model whose memory is updated by the rule `muon`.

    Channels are standardized with statistics of the training series. Series of one length come as an array, and X has
    this length in `predict` too. Series of a list can have any lengths: they are resampled linearly to one, not padded,
    since padding would tell the model how long a series is. `fit` draws from generators of its own and leaves torch's
    as it was; the same `random_state` gives the same model. Training and prediction run on the CPU.

    Args:
        backbone: a name in `muonssm.layers.BACKBONES`.
        muon: the memory rule, `Muon.off()` for a plain model. None is the paper's, `Muon()`.
        d_model, d_state, expand, layers, dropout, momentum, bidirectional: see `ActivityModelConfig`.
        epochs: passes over the training series, at most.
        batch_size: series per step, at most; the batches of an epoch differ by one series at most.
        learning_rate: of Adam at the start; a cosine decays it to 0.
        weight_decay: added to the gradient.
        label_smoothing: fraction of the target spread over all classes.
        class_weight: weights of the classes in the loss: a dict, `"balanced"`, or None for equal ones.
        length: samples that every series is resampled to. None: the length of an array, the median of a list.
        validation_fraction: fraction of the training series that is held out, stratified by class, to stop early and
            keep the epoch with the best accuracy on it. 0 trains all epochs and keeps the last.
        patience: epochs without improvement before training stops; counts only with a `validation_fraction`.
        random_state: an integer for the same weights, batches and dropout in every `fit`; None differs.
        verbose: print the loss of every epoch.

    Attributes:
        classes_: labels, sorted.
        n_features_in_: channels; the length of a 2-D X.
        n_channels_, n_timepoints_: channels, and samples after resampling.
        model_: the network, an `ActivityClassifier`.
        mean_, std_: `[channels]`, of the training series.
        n_iter_: epochs that were trained.
        loss_curve_: mean training loss of every epoch.
        validation_scores_: accuracy on the held-out series after every epoch; empty without them.
    """

    def __init__(
        self,
        backbone: str = "longhorn",
        muon: Muon | None = None,
        *,
        d_model: int = 128,
        d_state: int = 64,
        expand: int = 2,
        layers: int = 2,
        dropout: float = 0.1,
        momentum: str = "fixed",
        bidirectional: bool = False,
        epochs: int = 50,
        batch_size: int = 16,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-4,
        label_smoothing: float = 0.0,
        class_weight: dict[Any, float] | str | None = None,
        length: int | None = None,
        validation_fraction: float = 0.0,
        patience: int = 10,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.backbone = backbone
        self.muon = muon
        self.d_model = d_model
        self.d_state = d_state
        self.expand = expand
        self.layers = layers
        self.dropout = dropout
        self.momentum = momentum
        self.bidirectional = bidirectional
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.label_smoothing = label_smoothing
        self.class_weight = class_weight
        self.length = length
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    # ---- scikit-learn's methods

    def fit(self, X: Any, y: Any) -> MuonSSMClassifier:
        """Train a new model."""
        config, muon = self._check_settings()
        series = self._read(X, fitting=True)
        labels = self._read_labels(series, y)
        x = self._standardize(series, fitting=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model_ = ActivityClassifier(config, muon, x.shape[2], len(self.classes_))
            self._train(x, torch.from_numpy(labels), seed)
        self.model_.eval()
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of every series, `[n]`."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, in the order of `classes_`: `[n, classes]`."""
        check_is_fitted(self)
        logits = self._logits(self._standardize(self._read(X)))
        return logits.double().softmax(dim=1).numpy()

    # ---- input

    def _check_settings(self) -> tuple[ActivityModelConfig, Muon]:
        """Check all arguments; numbers of numpy, which searches draw, count as Python's."""
        given = {k: v.item() if isinstance(v, np.generic) else v for k, v in self.get_params(deep=False).items()}
        for name in ("epochs", "batch_size", "patience"):
            check_int(name, given[name], 1)
        if given["length"] is not None:
            check_int("length", given["length"], 1)
        check_number("learning_rate", given["learning_rate"], 0, open_low=True)
        check_number("weight_decay", given["weight_decay"], 0)
        for name in ("label_smoothing", "validation_fraction"):
            check_number(name, given[name], 0, 1, open_high=True)
        check_bool("verbose", given["verbose"])
        if not isinstance(self.muon, Muon | None):
            raise TypeError(f"muon must be a Muon or None, got {self.muon!r}")
        return ActivityModelConfig(**{name: given[name] for name in SIZES}), self.muon or Muon()

    def _read(self, X: Any, fitting: bool = False) -> np.ndarray:
        """Check X and resample it; returns `[n, channels, n_timepoints_]`, float32."""
        listed = _is_list_of_series(X)
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, and are refused
            series = [_read_series(one, i) for i, one in enumerate(X)] if listed else self._read_array(X, fitting)
        if fitting:
            lengths = [one.shape[1] for one in series]
            self.n_timepoints_ = int(np.median(lengths) if self.length is None else self.length)
            self.n_channels_ = len(series[0])
            self._fixed_length = None if listed else lengths[0]
        self._check_series(series, listed)
        return np.stack([_resample(one, self.n_timepoints_) for one in series])

    def _read_array(self, X: Any, fitting: bool) -> np.ndarray:
        """An array as `[n, channels, length]`; a table is one channel, and keeps the names of its columns."""
        shape: tuple[int, ...] = getattr(X, "shape", ())
        if not fitting and len(shape) == 3 and shape[1] != self.n_channels_:
            raise ValueError(f"X must have {self.n_channels_} channels, got {shape[1]}")
        checks: dict[str, Any] = {"dtype": np.float32, "allow_nd": True, "ensure_all_finite": False}
        X = validate_data(self, X, reset=fitting, **checks)
        if X.ndim > 3:
            raise ValueError(f"X must be [n, channels, length], [n, length] or a list, got an array of shape {X.shape}")
        return X[:, None] if X.ndim == 2 else X

    def _check_series(self, series: Any, listed: bool) -> None:
        """Check channels, lengths and numbers of all series."""
        for i, one in enumerate(series):
            if one.shape[0] != self.n_channels_:
                raise ValueError(f"X must have {self.n_channels_} channels, got {one.shape[0]} in series {i}")
            if not np.isfinite(one).all():
                channel, sample = np.argwhere(~np.isfinite(one))[0].tolist()
                got = "NaN" if np.isnan(one[channel, sample]) else "inf or a number beyond float32"
                raise ValueError(f"X must be finite, got {got} in series {i}, channel {channel}, sample {sample}")
        if not listed and self._fixed_length not in (None, series.shape[2]):
            wanted = f"{self._fixed_length} samples as in fit, or be a list, whose series can have any length"
            raise ValueError(f"X must have {wanted}, got {series.shape[2]}")

    def _read_labels(self, series: Any, y: Any) -> np.ndarray:
        """Check y; returns indices into `classes_`."""
        y = column_or_1d(y, warn=True)
        check_consistent_length(series, y)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have 2 or more classes, got {len(self.classes_)} class")
        return labels

    def _standardize(self, series: np.ndarray, fitting: bool = False) -> Tensor:
        """(x - mean) / std per channel; returns `[n, length, channels]`. The deviation of a constant channel is 1."""
        if fitting:
            self.mean_ = series.mean(axis=(0, 2), dtype=np.float64)
            self.std_ = series.std(axis=(0, 2), dtype=np.float64)
            self.std_[(self.std_ <= 1e-7 * np.abs(self.mean_)) | (self.std_ < np.finfo(np.float32).tiny)] = 1.0
        x = (series.transpose(0, 2, 1) - self.mean_) / self.std_
        return torch.from_numpy(x.astype(np.float32))

    # ---- training

    def _train(self, x: Tensor, labels: Tensor, seed: int) -> None:
        """Train `model_`; with held-out series, end with the weights of the best epoch."""
        train, held_out = self._hold_out(labels, seed)
        smoothing = float(self.label_smoothing)
        loss = torch.nn.CrossEntropyLoss(self._class_weights(labels), label_smoothing=smoothing)
        batches = math.ceil(len(train) / self.batch_size)
        optimizer = _build_optimizer(self.model_, float(self.learning_rate), float(self.weight_decay))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs * batches)
        self.loss_curve_: list[float] = []
        self.validation_scores_: list[float] = []
        best: tuple[int, dict[str, Tensor]] = (0, {})
        for epoch in range(self.epochs):
            order = train[torch.randperm(len(train))].tensor_split(batches)  # no batch is much smaller than the others
            self.loss_curve_.append(self._train_epoch(x, labels, order, loss, optimizer, schedule))
            if len(held_out):
                accuracy = (self._logits(x[held_out]).argmax(1) == labels[held_out]).double().mean().item()
                if accuracy > max(self.validation_scores_, default=-1.0):
                    best = (epoch, copy.deepcopy(self.model_.state_dict()))
                self.validation_scores_.append(accuracy)
            self._report(epoch)
            if len(held_out) and epoch - best[0] >= self.patience:
                break
        self.n_iter_ = len(self.loss_curve_)
        if len(held_out):
            self.model_.load_state_dict(best[1])

    def _class_weights(self, labels: Tensor) -> Tensor:
        y = self.classes_[labels.numpy()]
        return torch.tensor(compute_class_weight(self.class_weight, classes=self.classes_, y=y), dtype=torch.float32)

    def _hold_out(self, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """The series to train on, and those held out."""
        every = np.arange(len(labels))
        if self.validation_fraction == 0:
            return torch.from_numpy(every), torch.empty(0, dtype=torch.long)
        parts = train_test_split(
            every, test_size=float(self.validation_fraction), stratify=labels.numpy(), random_state=seed
        )
        return torch.from_numpy(parts[0]), torch.from_numpy(parts[1])

    def _train_epoch(self, x: Tensor, labels: Tensor, order: Any, loss: Any, optimizer: Any, schedule: Any) -> float:
        """One pass over the batches of `order`; returns the mean loss."""
        self.model_.train()
        total = 0.0
        for batch in order:
            value = loss(self.model_(x[batch])["logits"], labels[batch])
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(self.model_.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            total += value.item() * len(batch)
        return total / sum(map(len, order))

    def _report(self, epoch: int) -> None:
        if self.verbose:
            accuracy = f", held-out accuracy {self.validation_scores_[-1]:.3f}" if self.validation_scores_ else ""
            print(f"epoch {epoch + 1} of {self.epochs}: loss {self.loss_curve_[-1]:.4f}{accuracy}")

    def _logits(self, x: Tensor) -> Tensor:
        """The logits of standardized series, `[n, classes]`."""
        self.model_.eval()
        with torch.inference_mode():
            return torch.cat([self.model_(batch)["logits"] for batch in x.split(PREDICTION_BATCH)])


def _is_list_of_series(X: Any) -> bool:
    """Whether X is a list, or an array of objects, whose elements are `[channels, length]`."""
    is_list = isinstance(X, list | tuple) or (isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1)
    return is_list and len(X) > 0 and np.ndim(X[0]) == 2


def _read_series(series: Any, number: int) -> np.ndarray:
    """One element of a list as float32 `[channels, length]`."""
    try:
        array = np.asarray(series, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(f"X must be a list of [channels, length], got {error} in series {number}") from error
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"X must be a list of [channels, length], got shape {array.shape} in series {number}")
    return array


def _resample(series: np.ndarray, length: int) -> np.ndarray:
    """Interpolate `[channels, T]` linearly at `length` places from the first sample to the last."""
    T = series.shape[1]
    if length == T:
        return series
    places = np.linspace(0, T - 1, length)
    return np.stack([np.interp(places, np.arange(T), channel) for channel in series]).astype(np.float32)


def _build_optimizer(model: torch.nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Adam; modules name parameters that do not decay in `no_weight_decay()`."""
    modules = [module for module in model.modules() if hasattr(module, "no_weight_decay")]
    spared = [module.get_parameter(name) for module in modules for name in module.no_weight_decay()]  # type: ignore[operator]
    kept = {id(parameter) for parameter in spared}
    decaying = [parameter for parameter in model.parameters() if id(parameter) not in kept]
    groups = [{"params": decaying, "weight_decay": weight_decay}]
    groups += [{"params": spared, "weight_decay": 0.0}] if spared else []
    return torch.optim.Adam(groups, lr=learning_rate)
