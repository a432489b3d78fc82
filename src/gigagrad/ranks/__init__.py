"""Talk to the ranks that compute one image together: this process alone, processes, or threads."""

from gigagrad.ranks.mesh import TIMEOUT_SECONDS, Mesh, from_environment, launch, ranks_of
from gigagrad.ranks.ranks import Ranks, SingleRank, run_threaded

__all__ = [
    "TIMEOUT_SECONDS",
    "Mesh",
    "Ranks",
    "SingleRank",
    "from_environment",
    "launch",
    "ranks_of",
    "run_threaded",
]
