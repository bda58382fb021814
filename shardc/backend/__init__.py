"""The torch.compile backend; `compile` is its entry."""

from shardc.backend.compile import shardc_backend

__all__ = ["shardc_backend"]
