"""The `vlmrl` command: one file for each subcommand."""
