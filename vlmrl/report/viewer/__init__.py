"""The page of a run: written to a file, or served while the run goes on."""
