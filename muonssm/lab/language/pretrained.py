"""Load a trained language model from a folder: a run of this library, or a folder written by `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from muonssm.lab.core.library_output import hide_progress_bars
from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM

from .tokenizer import load_tokenizer

MODEL_FOLDERS = "the folder of a finished language run, or one written by save_pretrained, with its tokenizer"


class Pretrained(NamedTuple):
    """A model in evaluation mode, and its tokenizer."""

    model: MuonSSMForCausalLM
    tokenizer: Any

    @property
    def backbone(self) -> str:
        """The name of the model's backbone."""
        return self.model.config.backbone


def load_pretrained(folder: str | Path) -> Pretrained:
    """Load the model and the tokenizer in `folder`."""
    path = Path(folder)
    wanted = f"RUN must be {MODEL_FOLDERS}, got {str(folder)!r}"
    if not (path / "config.json").is_file():
        raise ValueError(f"{wanted}, which has no config.json")
    try:
        config = MuonSSMConfig.from_pretrained(path)
        if config.model_type != MuonSSMConfig.model_type:
            raise ValueError(f"its model_type is {config.model_type!r}")
        with hide_progress_bars():
            model = MuonSSMForCausalLM.from_pretrained(path, config=config)
    except Exception as error:  # the libraries raise many types for a damaged file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{wanted}, which cannot be loaded: {reason}") from error
    return Pretrained(model.eval(), load_tokenizer(str(path)))
