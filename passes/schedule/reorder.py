"""Put the nodes of a graph into another order: a priority toposort."""

import heapq
from collections.abc import Mapping

from torch.fx import GraphModule, Node

Key = tuple[int, ...]


def reorder(gm: GraphModule, keys: Mapping[Node, Key]) -> None:
    """Reorder a graph by `keys`: of all nodes whose inputs are there, the smallest key comes next.

    Equal keys keep their order. Nodes without a key (inputs, constants) stay in front.
    """
    rank = {node: index for index, node in enumerate(gm.graph.nodes)}
    missing = {n: sum(i in keys for i in n.all_input_nodes) for n in keys}
    ready = [(keys[n], rank[n], n) for n, count in missing.items() if count == 0]
    heapq.heapify(ready)
    output = gm.graph.output_node()
    while ready:
        _, _, node = heapq.heappop(ready)
        output.prepend(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1
                if missing[user] == 0:
                    heapq.heappush(ready, (keys[user], rank[user], user))
