"""`python -m megarl.cli`, as Slurm's scripts start it."""

import sys

from megarl.cli.command import main

sys.exit(main())
