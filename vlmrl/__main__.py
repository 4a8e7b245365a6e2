"""`python -m vlmrl` is the `vlmrl` command."""

from vlmrl.cli.main import main

main()
