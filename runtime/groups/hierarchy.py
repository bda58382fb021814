"""Groups for gathers in two steps: across nodes first, then inside each node.

A ring over all ranks of many nodes takes one step a rank; a ring across nodes takes one step a
node. Ranks are numbered by their place in their node first, so the segments of the ranks at one
place form one stretch of the bucket. A gather across nodes gives a rank its stretch; the gather
inside a node puts the stretches side by side. Nothing is copied between the steps.
"""

from functools import partial

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.groups.communicators import kept_with, own_group
from shardc.runtime.layout.spec import Hierarchy


def hierarchical_group(local: int) -> dist.ProcessGroup:
    """The group of all ranks, `local` a node, numbered by their place in their node first.

    The group is made at first use; every rank must call the function.
    """
    world = compat.default_group()
    return kept_with(world, ("hierarchical", local), partial(_make, world, local))


def hierarchy_of(group: dist.ProcessGroup) -> Hierarchy | None:
    """The steps in which the ranks of `group` gather, if `hierarchical_group` made it."""
    return kept_with(group, Hierarchy, lambda: None)


def own_hierarchy(hierarchy: Hierarchy, purpose: str, high_priority: bool) -> Hierarchy:
    """The steps of `hierarchy` over communicators for one purpose; see `own_group`."""
    across, inside = (
        own_group(group, purpose, high_priority) for group in (hierarchy.across, hierarchy.inside)
    )
    return hierarchy._replace(across=across, inside=inside)


def _make(world: dist.ProcessGroup, local: int) -> dist.ProcessGroup:
    ranks, timeout = dist.get_world_size(), compat.group_timeout(world)
    node, place = divmod(dist.get_rank(), local)

    def group(members: range | list[int], purpose: str) -> dist.ProcessGroup:
        return compat.new_group(
            list(members), f"{purpose}_{local}", keeps_order=True, timeout=timeout
        )

    columns = [range(first, ranks, local) for first in range(local)]
    whole = group([rank for column in columns for rank in column], "hierarchical")
    across = group(columns[place], "across_nodes")
    inside = group(range(node * local, (node + 1) * local), "inside_node")
    steps = Hierarchy(
        ranks // local,
        compat.also_named(across, f"{ranks // local}_across_nodes"),
        local,
        compat.also_named(inside, f"{local}_inside_node"),
    )
    kept_with(whole, Hierarchy, lambda: steps)
    return whole
