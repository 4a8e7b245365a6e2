"""`python -m vlmrl` is the `vlmrl` command."""

from vlmrl.cli import main

main()
