"""What is found of a graph is found once, for each of its questions, and goes with the graph."""

import gc
import weakref

from gigagrad.graphs.graph import Graph, remembered


class Answer:
    pass


def test_an_answer_is_found_once_and_goes_with_its_graph():
    asked = []

    @remembered
    def find(graph, number):
        asked.append((len(graph.nodes), number))
        return Answer()

    graph, other = Graph((), (), False), Graph((), (), False)
    first, second = find(graph, 1), find(graph, 2)
    assert find(graph, 1) is first
    assert find(graph, 2) is second
    assert find(other, 1) is not first
    assert asked == [(0, 1), (0, 2), (0, 1)]
    gone = weakref.ref(first)
    del graph, first
    gc.collect()
    assert gone() is None
