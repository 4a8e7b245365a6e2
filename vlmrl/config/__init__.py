"""The settings of a run: frozen dataclasses that check their values when they are created.

A recipe returns one :class:`Config`; the command line overrides any field of it (``--optim.lr 1e-6``). The docstring of a field
is its help text. Every error names the field, the rule and the value.
"""

from vlmrl.config.cluster import Cluster
from vlmrl.config.code import resolve_config
from vlmrl.config.data import Conversations, Data, EvalData, Part
from vlmrl.config.fields import Code, Options, name_of
from vlmrl.config.gateway import Gateway
from vlmrl.config.model import Lora, Model
from vlmrl.config.rollout import Rollout
from vlmrl.config.run import Config
from vlmrl.config.servers import ServerSettings
from vlmrl.config.training import SFT, Algo, Checkpoint, Eval, Optim, Report, Teacher, Train, WarmStart

__all__ = [
    "SFT",
    "Algo",
    "Checkpoint",
    "Cluster",
    "Code",
    "Config",
    "Conversations",
    "Data",
    "Eval",
    "EvalData",
    "Gateway",
    "Lora",
    "Model",
    "Optim",
    "Options",
    "Part",
    "Report",
    "Rollout",
    "ServerSettings",
    "Teacher",
    "Train",
    "WarmStart",
    "name_of",
    "resolve_config",
]
