"""`python -m muonssm` is the `muonssm` command."""

import sys

from muonssm.cli import main

sys.exit(main())
