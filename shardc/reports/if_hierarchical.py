"""The time of a step on a hierarchical mesh: gathers go across nodes first, then inside of them."""

from shardc.passes.estimate.cost import among_copies, collective_seconds
from shardc.passes.estimate.hardware import Profile
from shardc.reports.record import CollectiveRow, Record
from shardc.reports.replay import Carried, replay


def if_hierarchical(record: Record, profile: Profile) -> float | None:
    """Seconds of the step with two steps a collective; reductions inside of nodes count as hidden.

    None where no hierarchical mesh fits: the ranks are not several whole nodes of several ranks,
    the model has copies, or a collective is among fewer ranks or goes in two steps already.
    """
    local, world = profile.node_size, record.world_size
    rings = [row for row in record.collectives if row.kind in ("all_gather", "reduce_scatter")]
    whole = all(row.ranks == world and not row.in_steps for row in rings)
    if local == 1 or world <= local or world % local or record.copies > 1 or not whole:
        return None
    across, nodes = among_copies(profile, local), world // local

    def carried(row: CollectiveRow) -> Carried:
        if row not in rings:
            return Carried(row.seconds)
        # Coalesced buckets travel one by one where a collective goes in two steps.
        again = (len(row.buckets) - 1) * collective_seconds(0, nodes, across)
        seconds = collective_seconds(row.nbytes / local, nodes, across) + again
        inside = collective_seconds(row.nbytes, local, profile)
        return Carried(seconds, then=inside if row.brings_parameters else 0.0)

    return replay(record, carried)
