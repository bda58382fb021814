"""`python -m shardc`, the same as `shardc`: for torchrun, which starts modules."""

import sys

from shardc.commands.cli import main

sys.exit(main())
