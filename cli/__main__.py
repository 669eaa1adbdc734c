"""``python -m xret.cli``."""

from . import main

main()
