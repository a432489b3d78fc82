"""Talk to the ranks that compute one image together: this process alone, processes, or threads."""

from gigagrad.errors import RankError
from gigagrad.ranks.mesh import TIMEOUT_SECONDS, Mesh, from_environment, launch, ranks_of
from gigagrad.ranks.ranks import Message, Ranks, SingleRank, ThreadedRank, mismatched_numerics, run_threaded

__all__ = [
    "TIMEOUT_SECONDS",
    "Mesh",
    "Message",
    "RankError",
    "Ranks",
    "SingleRank",
    "ThreadedRank",
    "from_environment",
    "launch",
    "mismatched_numerics",
    "ranks_of",
    "run_threaded",
]
