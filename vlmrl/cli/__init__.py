"""The `vlmrl` command: one module per subcommand, each with its arguments and a method `run`."""
