"""The passes that give forward and backward graphs their shape, in order.

One list for the graphs that run and for those that are only tried (`budget`), so that what is
planned for is what runs.
"""

from shardc.passes.bucket import bucket
from shardc.passes.reshard import drop_second_gathers
from shardc.passes.runner import Pass
from shardc.passes.schedule import schedule
from shardc.passes.write_gradients import write_gradients

SHAPING_PASSES: list[Pass] = [drop_second_gathers, bucket, schedule, write_gradients]
