"""``python -m xret.cli``, for ``torchrun -m xret.cli``."""

from . import main

main()
