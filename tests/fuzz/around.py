"""What a case does around its steps: names, and the functions of `operations.py` that they call."""

import functools
import inspect
import re

from fuzz import operations

AROUND = {
    # name: the name in a program; it is called for both sides after a step
    "average": "average_weights",
    "moving average": "moving_average",
    "scaled call": "call_with_scaled",
    "whole call": "call_with_whole",
    "call with one": "call_with_one",
    "torch.save": "save_each",
    "torch full": "save_full_by_torch",
    "torch broadcast": "broadcast_by_torch",
    "distributed": "load_distributed",
    "rows": "load_rows",
    "group": "add_group",
    "data": "assign_data",
    "in place": "change_in_place",
    "unfreeze": "unfreeze",
    "read": "read_parameters",
    "slices": "read_slices",
    "trained call": "train_what_is_given",
    "step by hand": "step_by_hand",
    "assigned parameter": "assign_parameters",
    "pickled optimizer": "reload_optimizer",
    "moved": "move",
}

REPLACED = {
    # name: lines that replace a side's model, what runs it or its optimizer
    "copied": "ours, call, optimizer = go_on_with_copy(ours, call, optimizer, caller)\n"
    "plain.zero_grad()",
    "assign": "for model in (plain, ours):\n    assign_state(model)\n"
    "theirs, optimizer = renewed(theirs, plain), renewed(optimizer, ours)\n"
    "plain.zero_grad()",
    "double": "theirs, optimizer = doubled(theirs, plain), doubled(optimizer, ours)",
}

GRADIENTS = {
    # name: the name in a program; it is called for both sides before the optimizer's step
    "norm": "norm_by_hand",
    "value": "clip_values",
    "halved": "halve_gradients",
    "foreach": "halve_gradients_at_once",
    "replaced": "replace_gradients",
    "whole": "give_whole_gradients",
    "none": "drop_a_gradient",
}

ADDED = {
    # name: what is added to the loss outside of the forward
    "squares": "sum(p.square().sum() for p in trained(model))",
    # The direction of what is nothing but rounding is another on each side.
    "norms": "x.mean() * sum(p.norm() for p in trained(model) if p.norm() > 1e-6)",
    "scaled squares": "x.mean() * sum((2 * p).square().sum() for p in trained(model))",
    "whole": "sum(whole(p).square().sum() for p in trained(model))",
}


@functools.cache
def sources() -> dict[str, str]:
    """The text of each operation."""
    functions = inspect.getmembers(operations, inspect.isfunction)
    return {n: inspect.getsource(f) for n, f in functions if f.__module__ == operations.__name__}


def called(text: str) -> list[str]:
    """The source of the operations that `text` calls, and of those that they call."""
    known = sources()
    found: set[str] = set()
    todo = [text]
    while todo:
        names = set(re.findall(r"\w+", todo.pop())) & known.keys() - found
        found |= names
        todo += [known[name] for name in names]
    return [source.strip() for name, source in known.items() if name in found]
