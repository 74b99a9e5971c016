"""``python -m doubleback``: the command line."""

import sys

from doubleback.cli import main

sys.exit(main())
