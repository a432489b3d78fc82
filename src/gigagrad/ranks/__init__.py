"""Who computes the parts of one image together: this process alone, processes, or threads that stand for them."""

from gigagrad.ranks.clocked import Clocked
from gigagrad.ranks.meshes import ranks_of
from gigagrad.ranks.ranks import Alone, Message, RankError, Ranks
from gigagrad.ranks.virtual import Virtual, run_virtual

__all__ = ["Alone", "Clocked", "Message", "RankError", "Ranks", "Virtual", "ranks_of", "run_virtual"]
