"""What leaves for the Hub: an adapter with its processor, its card and its figures, and nothing else."""

from .push import push_adapter, push_model

__all__ = ["push_adapter", "push_model"]
