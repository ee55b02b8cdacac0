"""What models are trained for: losses per record, and metrics."""

from tacit.tasks.base import Task
from tacit.tasks.classification import Classification

__all__ = ["Classification", "Task"]
