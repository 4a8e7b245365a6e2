"""A short run with a server, which `test_torchrun.py` starts on each of two ranks."""

import sys
from dataclasses import replace
from pathlib import Path

from testing.real_servers import config_of

from vlmrl.config import Optim
from vlmrl.run.program import run_training

if __name__ == "__main__":
    model, folder = map(Path, sys.argv[1:])
    run_training(replace(config_of(model, folder, dtype="float32"), optim=Optim(lr=3e-3)))
