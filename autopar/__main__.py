"""``python -m autopar`` is the command ``autopar``."""

from autopar.cli import main

main()
