"""A trained language model by its folder: a run of ours, or any folder that transformers saved one of ours to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from muonssm.lab.core.library_output import hide_progress_bars
from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM

from .tokenizer import load_tokenizer

MAY_BE = "the folder of a finished language run, or one that save_pretrained wrote, with its tokenizer"


class Pretrained(NamedTuple):
    """A model in evaluation mode, and its tokenizer."""

    model: MuonSSMForCausalLM
    tokenizer: Any

    @property
    def backbone(self) -> str:
        return self.model.config.backbone


def load_pretrained(folder: str | Path) -> Pretrained:
    """The model and the tokenizer in `folder`."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ValueError(f"RUN is {str(folder)!r}, which has no config.json; it may be {MAY_BE}")
    try:
        config = MuonSSMConfig.from_pretrained(path)
        if config.model_type != MuonSSMConfig.model_type:
            raise ValueError(f"its model_type is {config.model_type!r}")
        with hide_progress_bars():
            model = MuonSSMForCausalLM.from_pretrained(path, config=config)
    except Exception as error:  # the libraries raise many kinds for a damaged file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"RUN is {str(folder)!r}, which cannot be loaded: {reason}; it may be {MAY_BE}") from error
    return Pretrained(model.eval(), load_tokenizer(str(path)))
