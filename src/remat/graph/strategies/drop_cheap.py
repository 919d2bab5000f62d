"""Chen et al. 2016, section 4.1: results that are cheap to compute again are dropped, the others are kept.

Cheap are normalisations, activations, pooling and other passes over memory; convolutions and matrix products are not,
and neither is what draws random numbers.
"""

from __future__ import annotations

from ..cuts import Forward
from ..graphs import Graph, Kind, Program
from ..replay import replayed


def plan(graph: Graph) -> Program:
    """Keep what is not cheap."""
    forward = Forward.of(graph)
    dear = (graph.nodes[k] for k in forward.steps if graph.nodes[k].kind is not Kind.CHEAP)
    return replayed(forward, {storage for node in dear for storage in node.fresh})
