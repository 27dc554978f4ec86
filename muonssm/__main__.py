"""`python -m muonssm` is the `muonssm` command."""

import sys

from .cli import main

sys.exit(main())
