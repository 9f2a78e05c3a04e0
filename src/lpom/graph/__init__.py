"""A network is a graph of states: nodes are activations, edges are all that lies between."""

from lpom.graph.building import trace
from lpom.graph.edges import Edge, Switches
from lpom.graph.network import Graph, Node

__all__ = ["Edge", "Graph", "Node", "Switches", "trace"]
