"""Weight updates from the trainer to the engine: a class for each way of sending, the same for all server programs."""

from collections.abc import Callable

from vlmrl.weight_sync.base import IpcSender, SenderState, WeightSender, WeightUpdate
from vlmrl.weight_sync.disk import DiskSender
from vlmrl.weight_sync.nccl import NcclSender

SENDERS: dict[str, Callable[[WeightUpdate, SenderState], WeightSender]] = {
    "tensor": IpcSender,
    "group": NcclSender,
    "disk": DiskSender,
}
"""Ways of sending weights to servers, by the value of the setting `sync`."""
