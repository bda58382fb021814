"""The torch.compile backend, with the reports that listen for its plans."""

from shardc.backend import shardc_backend
from shardc.reports import live, plan_text  # noqa: F401

__all__ = ["shardc_backend"]
