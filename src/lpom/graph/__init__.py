"""A network is a graph of states: nodes are activations, edges are all that lies between."""

from lpom.graph.building import trace
from lpom.graph.chain import Chain, Dense, Layer, chain
from lpom.graph.edges import Edge, Switches
from lpom.graph.network import Graph, Node

__all__ = ["Chain", "Dense", "Edge", "Graph", "Layer", "Node", "Switches", "chain", "trace"]
