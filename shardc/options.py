"""What `torch.compile(..., backend="shardc", options={...})` takes, checked."""

import difflib
from dataclasses import dataclass, field, fields
from typing import Any

from shardc.passes.profiles import Profile, as_profile, budget_bytes, current_profile
from shardc.runtime import compat


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., backend="shardc", options={...})` takes.

    Attributes:
        executor: "inductor", or "eager" to run the same graphs op by op.
        fallback: run a graph that Inductor cannot compile in the eager executor, with a warning.
        fold: whether Inductor compiles once what repeats from block to block.
        inductor: settings of `torch._inductor.config` for this compile. Passes among them run
            before those of shardc; what moves or merges collectives is refused.
        schedule: False leaves collectives where they are used.
        profile: the hardware to plan for, by name or as a `Profile`; default: what `calibrate` or
            `set_profile` set, else the device's.
        prefetch: "auto", or how many units ahead gathers start (0: none).
        backward_prefetch: FSDP1's, for the backward: "auto", "pre", "post" or None.
        coalesce: whether small collectives may travel in one message; default: where the backend
            does not copy them for it (gloo does).
        memory_budget: bytes a step may use on this device, segments, gradients and optimizer state
            included: a count, a text such as "70GB" or "16GiB", or a fraction of the device's
            memory. Units whose `reshard_after_forward` is None stay gathered where there is room.
        optimizer_states: copies of the parameters that the optimizer keeps (2: Adam).
        agreement_timeout: seconds ranks wait for each other when they compare their sequences of
            collectives; default: the process group's timeout.
        lower: False stops at the planned graphs, which then give fake tensors (`explain`); it is
            not for users.
    """

    executor: str = "inductor"
    fallback: bool = True
    fold: bool = True
    inductor: dict[str, Any] = field(default_factory=dict)
    schedule: bool = True
    profile: Profile | str | None = None
    prefetch: int | str = "auto"
    backward_prefetch: str | None = "auto"
    coalesce: bool | None = None
    memory_budget: int | float | str | None = None
    optimizer_states: float = 2.0
    agreement_timeout: float | None = None
    lower: bool = True

    @staticmethod
    def parse(given: dict[str, Any] | None) -> "Options":
        """Check a user's dict. Raises ValueError naming the option and what it may be."""
        given = given or {}
        known = [f.name for f in fields(Options) if f.name != "lower"]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise ValueError(
                    f"unknown shardc option '{name}'{hint} (known: {', '.join(known)})"
                )
        options = Options(**given)
        if options.executor not in ("inductor", "eager"):
            raise ValueError(f"executor must be 'inductor' or 'eager', got {options.executor!r}")
        if options.prefetch != "auto" and not (
            isinstance(options.prefetch, int) and options.prefetch >= 0
        ):
            raise ValueError(
                f"prefetch must be 'auto' or a count of units, got {options.prefetch!r}"
            )
        if options.backward_prefetch not in ("auto", "pre", "post", None):
            raise ValueError(
                "backward_prefetch must be 'auto', 'pre', 'post' or None, "
                f"got {options.backward_prefetch!r}"
            )
        if options.inductor:
            _check_order(options.inductor)
        profile = as_profile(options.profile) if options.profile is not None else None
        if options.memory_budget is not None:
            if not options.schedule:
                raise ValueError("memory_budget needs schedule=True")
            budget_bytes(options.memory_budget, profile or current_profile("cpu"))
        return options


def _check_order(inductor: dict[str, Any]) -> None:
    """Raise ValueError where a setting of Inductor would undo the planned order of collectives."""
    for name, value in compat.order_settings().items():
        if inductor.get(name, value) != value:
            raise ValueError(
                f"options={{'inductor': {{'{name}': {inductor[name]!r}}}}} would have Inductor "
                "move or merge the collectives that shardc has planned and that all ranks have "
                f"agreed on: leave it at {value!r}. What shardc plans with are the options "
                "'prefetch', 'coalesce' and 'profile'"
            )
