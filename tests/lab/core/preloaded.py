"""What the server of commands.py imports before it forks the first command."""

from __future__ import annotations

from muonssm.lab.core.amx import disable_broken_amx
from muonssm.lab.core.torchvision_cpu import prepare_torchvision

prepare_torchvision()
disable_broken_amx()

import matplotlib.figure  # noqa: E402, F401
import scipy.stats  # noqa: E402, F401
import torch.utils.tensorboard  # noqa: E402, F401

import muonssm.cli  # noqa: E402
import muonssm.lab.activity.dataset  # noqa: E402
import muonssm.lab.analysis.analyses  # noqa: E402
import muonssm.lab.core.compare  # noqa: E402
import muonssm.lab.core.trainer  # noqa: E402
import muonssm.lab.language.prepare  # noqa: E402
import muonssm.lab.report.report  # noqa: E402, F401
import tests.lab.core.commands  # noqa: E402, F401
