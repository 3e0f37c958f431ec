"""`python -m diffrate`, which is also how `accelerate launch -m diffrate …` starts several processes."""

from diffrate.cli.app import main

main()
