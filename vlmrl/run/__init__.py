"""One training run: `loop.py` is the algorithm, `build.py` makes its parts, `program.py` is the program around them."""
