"""Who computes the parts of one image together: this process alone, processes, or threads that stand for them."""

from gigagrad.errors import RankError
from gigagrad.ranks.alike import unlike
from gigagrad.ranks.fleet import TIMEOUT_SECONDS, Fleet, from_environment
from gigagrad.ranks.joining import launch
from gigagrad.ranks.meshes import ranks_of
from gigagrad.ranks.ranks import Alone, Message, Ranks
from gigagrad.ranks.virtual import Virtual, run_virtual

__all__ = [
    "TIMEOUT_SECONDS",
    "Alone",
    "Fleet",
    "Message",
    "RankError",
    "Ranks",
    "Virtual",
    "from_environment",
    "launch",
    "ranks_of",
    "run_virtual",
    "unlike",
]
