"""Weights of the release of MambaVision into our network, whose SSM is then plain or has Muon.

    model = mambavision_tiny(muon=Muon.off())
    load_published(model, torch.load("mambavision_tiny_1k.pth.tar", weights_only=True))

The names are the same, but for what savers put around them: the state dict may stand under `state_dict` or `model` in
what was saved, and every name may begin with `model.` or `module.`. The weights are not ours, and their licence is
non-commercial (CC-BY-NC-SA).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from muonssm.layers.convert import is_learned_momentum

from .network import MambaVision

HEADS = ("load", "keep")
HEAD = ("head.weight", "head.bias")
TOP = ("head.", "norm.")  # what a network without a classifier has not


def load_published(model: MambaVision, weights: Mapping[str, Any], head: str = "load") -> MambaVision:
    """Loads a checkpoint of the release, or of one of our own networks, into `model`, in place.

    Args:
        model: with Mamba mixers and the sizes of the checkpoint; for one of our own, of the same backbone.
        weights: what `torch.load` or safetensors give.
        head: `"load"` takes the classifier too, whose size must then be the model's; `"keep"` leaves the model's as it
            is, for other classes.

    Parameters of a learned momentum, which the release has not, keep their values. Anything else that is missing, left
    over or of another shape is an error, and nothing is loaded.
    """
    if not isinstance(model, MambaVision):
        raise TypeError(f"model is of type {type(model).__name__}; it may be a MambaVision")
    if head not in HEADS:
        raise ValueError(f"head is {head!r}; it may be one of {HEADS}")
    given = _state_dict(weights)
    own = model.state_dict()
    if head == "keep":
        given = {name: tensor for name, tensor in given.items() if name in own or not name.startswith(TOP)}
        given = {name: tensor for name, tensor in given.items() if name not in HEAD}
        given |= {name: own[name] for name in HEAD if name in own}
    _check(given, own)
    given |= {name: tensor for name, tensor in own.items() if name not in given}
    model.load_state_dict(given)
    return model


def _state_dict(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Names as in the network, from what a checkpoint may have around them."""
    for key in ("state_dict", "model"):
        if isinstance(weights, Mapping) and isinstance(weights.get(key), Mapping):
            weights = weights[key]
    if not isinstance(weights, Mapping) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise TypeError(
            "weights are no state dict; they may be a mapping of names to tensors, or have one as state_dict"
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
            f"weights have {_some(unknown)} too much and lack {_some(missing)}; they may be those of a MambaVision of "
            "the same size and backbone"
        )
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            hint = "; head='keep' leaves the model's head as it is" if name in HEAD else ""
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; for this model it may be {list(own[name].shape)}{hint}"
            )


def is_optional(name: str) -> bool:
    """What a checkpoint may lack: a learned momentum, and the counters of batch norms, which nothing reads."""
    _, _, inner = name.rpartition(".mixer.")
    return is_learned_momentum(inner.removeprefix("layer.")) or name.endswith("num_batches_tracked")


def _some(names: list[str]) -> str:
    """A few names in full."""
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
