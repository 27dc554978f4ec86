"""Imported before the models on transformers: where transformers cannot be used, the error says what to do.

transformers imports torchvision if that is installed. PyPI's wheel of torchvision is linked with CUDA and cannot be
imported beside a torch without CUDA; transformers' own error does not name torchvision.
"""

from __future__ import annotations

import importlib


def check_transformers() -> None:
    """Import the base class of transformers' models; raise an ImportError that says what to do if that fails."""
    try:
        importlib.import_module("transformers").PreTrainedModel  # noqa: B018, transformers imports its parts when read
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            advice = "models on transformers need transformers: pip install 'muonssm[language]'"
        elif "torchvision" in _causes(error):
            advice = (
                "transformers cannot import the installed torchvision, which does not fit this build of torch. Run "
                "`from muonssm.lab.core.torchvision_cpu import prepare_torchvision; prepare_torchvision()` before "
                "transformers is imported, or install the torchvision from download.pytorch.org/whl/cpu"
            )
        else:
            raise
        raise ImportError(advice) from error


def _causes(error: BaseException) -> str:
    """The texts of the errors behind an error."""
    text, cause = "", error.__cause__
    while cause is not None:
        text, cause = f"{text}\n{cause}", cause.__cause__
    return text


check_transformers()
