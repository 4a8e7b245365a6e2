"""The settings of a run: frozen dataclasses, checked when they are made.

A recipe returns one :class:`Config`; the command line overrides any field of it (``--optim.lr 1e-6``). The docstring of
a field is its help text. Every complaint names the field, the rule and the value.
"""

from vlmrl.config.data import Data, Part
from vlmrl.config.fields import Code, Options, name_of
from vlmrl.config.model import Lora, Model
from vlmrl.config.rollout import Rollout
from vlmrl.config.run import Cluster, Config
from vlmrl.config.servers import ServerSettings
from vlmrl.config.sglang import SGLang
from vlmrl.config.training import Algo, Checkpoint, Eval, Optim, Train, WarmStart

__all__ = [
    "Algo",
    "Checkpoint",
    "Cluster",
    "Code",
    "Config",
    "Data",
    "Eval",
    "Lora",
    "Model",
    "Optim",
    "Options",
    "Part",
    "Rollout",
    "SGLang",
    "ServerSettings",
    "Train",
    "WarmStart",
    "name_of",
]
