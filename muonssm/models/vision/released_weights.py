"""Load the weights of MambaVision's release into a network with a plain SSM or with Muon.

    model = mambavision_tiny(muon=Muon.off())
    load_published(model, torch.load("mambavision_tiny_1k.pth.tar", weights_only=True))

The names are those of the release. The state dict can be nested under `state_dict` or `model`, and its names can have
the prefix `model.` or `module.`. The weights of the release have a non-commercial license (CC-BY-NC-SA).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from muonssm.checks import check_choice
from muonssm.layers.convert import is_learned_momentum

from .network import MambaVision

HEAD_CHOICES = ("load", "keep")
HEAD = ("head.weight", "head.bias")
CLASSIFIER = ("head.", "norm.")  # prefixes that a network without a classifier lacks


def load_published(model: MambaVision, weights: Mapping[str, Any], head: str = "load") -> MambaVision:
    """Load a checkpoint of the release, or of a network of this library, into `model`, in place.

    Args:
        model: a network with the checkpoint's sizes and backbone (Mamba for the release).
        weights: the checkpoint, as `torch.load` or safetensors returns it.
        head: `"load"` loads the classifier, whose classes must match; `"keep"` keeps the model's own.

    A learned momentum, which the release lacks, keeps its values. Any other missing or unknown name and any other shape
    is an error, and nothing is loaded.
    """
    if not isinstance(model, MambaVision):
        raise TypeError(f"model must be a MambaVision, got {type(model).__name__}")
    check_choice("head", head, HEAD_CHOICES)
    given = _state_dict(weights)
    own = model.state_dict()
    if head == "keep":
        given = {name: tensor for name, tensor in given.items() if name in own or not name.startswith(CLASSIFIER)}
        given = {name: tensor for name, tensor in given.items() if name not in HEAD}
        given |= {name: own[name] for name in HEAD if name in own}
    _check(given, own)
    given |= {name: tensor for name, tensor in own.items() if name not in given}
    model.load_state_dict(given)
    return model


def _state_dict(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Find the state dict in a checkpoint, and remove the prefixes of its names."""
    for key in ("state_dict", "model"):
        if isinstance(weights, Mapping) and isinstance(weights.get(key), Mapping):
            weights = weights[key]
    if not isinstance(weights, Mapping) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise TypeError(
            f"weights must be a state dict, or have one as 'state_dict' or 'model', got {type(weights).__name__}"
        )
    given = dict(weights)
    for prefix in ("module.", "model."):
        if given and all(name.startswith(prefix) for name in given):
            given = {name.removeprefix(prefix): tensor for name, tensor in given.items()}
    return given


def _check(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    optional = {name for name in own if is_optional(name)}
    missing = [name for name in own if name not in given and name not in optional]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        raise ValueError(
            "weights must be those of a MambaVision of the same size and backbone; "
            f"missing: {_first(missing)}; unknown: {_first(unknown)}"
        )
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            hint = "; use head='keep' to keep the model's head" if name in HEAD else ""
            raise ValueError(f"{name} must have shape {list(own[name].shape)}, got {list(tensor.shape)}{hint}")


def is_optional(name: str) -> bool:
    """Whether a checkpoint can lack a name: a learned momentum, or a batch norm's counter, which nothing reads."""
    _, _, inner = name.rpartition(".mixer.")
    return is_learned_momentum(inner.removeprefix("layer.")) or name.endswith("num_batches_tracked")


def _first(names: list[str]) -> str:
    """Join the first three names."""
    if not names:
        return "none"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
