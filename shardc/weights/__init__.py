"""Weights for rollouts: streams of whole tensors, plans from trainers to an inference layout."""

from shardc.weights.handover import Packed, broadcast, opened, packed, share
from shardc.weights.layouts import Destination, Layout, LayoutBuilder, Piece, inference_layout
from shardc.weights.loading import load
from shardc.weights.rank_plan import Part, RankPlan, Source, plan_rank
from shardc.weights.stream import full_tensors
from shardc.weights.transfer import Plan, plan, seconds

__all__ = [
    "Destination",
    "Layout",
    "LayoutBuilder",
    "Packed",
    "Part",
    "Piece",
    "Plan",
    "RankPlan",
    "Source",
    "broadcast",
    "full_tensors",
    "inference_layout",
    "load",
    "opened",
    "packed",
    "plan",
    "plan_rank",
    "seconds",
    "share",
]
