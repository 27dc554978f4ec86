"""Load a trained language model from a folder: a run of this library, or a folder written by `save_pretrained`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from muonssm.lab.core.library_output import hide_progress_bars
from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM

from .tokenizer import load_tokenizer, refuse_code

MODEL_FOLDERS = "the folder of a finished language run, or one written by save_pretrained, with its tokenizer"
MAX_NAMES = 5  # of tensors in a message


class DivergedError(ValueError):
    """A model whose weights are not finite numbers: what it generates and scores means nothing."""


class Pretrained(NamedTuple):
    """A model in evaluation mode, and its tokenizer."""

    model: MuonSSMForCausalLM
    tokenizer: Any

    @property
    def backbone(self) -> str:
        """The name of the model's backbone."""
        return self.model.config.backbone


def load_pretrained(folder: str | Path) -> Pretrained:
    """Load the model and the tokenizer in `folder`. Code in the folder is never run."""
    path = Path(folder)
    config = read_config(path, "RUN")
    model = load_model(path, config, "RUN")
    check_finite(model, folder)
    return Pretrained(model.eval(), load_tokenizer(str(path)))


def read_config(folder: Path, argument: str) -> MuonSSMConfig:
    """Read the config.json of a model's folder, which the setting `argument` names."""
    wanted = f"{argument} must be {MODEL_FOLDERS}, got {str(folder)!r}"
    if not (folder / "config.json").is_file():
        raise ValueError(f"{wanted}, which has no config.json")
    refuse_code(folder)
    try:
        config = MuonSSMConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type != MuonSSMConfig.model_type:
            raise ValueError(f"its model_type is {config.model_type!r}")
    except Exception as error:  # the libraries raise many types for a damaged file
        raise ValueError(f"{wanted}, which cannot be loaded: its config.json: {_first_line(error)}") from error
    return config


def load_model(folder: Path, config: MuonSSMConfig, argument: str, new: Collection[str] = ()) -> MuonSSMForCausalLM:
    """Load safetensors weights; raise unless the file has exactly the model's tensors. `new` can be missing."""
    wanted = f"{argument} must be {MODEL_FOLDERS}, got {str(folder)!r}"
    try:
        with hide_progress_bars():
            loaded: Any = MuonSSMForCausalLM.from_pretrained(
                folder,
                config=config,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # the libraries raise many types for a damaged file
        raise ValueError(f"{wanted}, which cannot be loaded: {_first_line(error)}") from error
    model, info = loaded
    for problem, names in (("lacks", set(info["missing_keys"]) - set(new)), ("has unknown", info["unexpected_keys"])):
        if names:
            listed = ", ".join(sorted(names)[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
            raise ValueError(f"{wanted}, whose model.safetensors {problem} {len(names)} tensors: {listed}")
    return model


def check_finite(model: nn.Module, folder: str | Path) -> None:
    """Raise DivergedError unless all weights are finite numbers."""
    wrong = next((name for name, weight in model.named_parameters() if not weight.isfinite().all()), None)
    if wrong is not None:
        raise DivergedError(f"RUN must have finite weights, got {str(folder)!r}, a run that diverged: see {wrong}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
