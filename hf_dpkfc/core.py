"""The private core without a trainer: for benchmarks, and for training loops of your own."""

from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.losses import CustomLoss, Task, TaskLoss, task_of
from hf_dpkfc.mechanism.clipping import ClippedSum, Clipper
from hf_dpkfc.mechanism.independence import check_independence
from hf_dpkfc.mechanism.noise import privatize
from hf_dpkfc.mechanism.randomness import SecretKey, StepRandomness
from hf_dpkfc.mechanism.sampling import PoissonSampler
from hf_dpkfc.privacy.ledger import PrivacyLedger
from hf_dpkfc.privacy.plan import steps_in

__all__ = [
    "ClippedSum",
    "Clipper",
    "CustomLoss",
    "PoissonSampler",
    "PrivacyLedger",
    "SecretKey",
    "StepRandomness",
    "Task",
    "TaskLoss",
    "check_independence",
    "inspect_model",
    "privatize",
    "steps_in",
    "task_of",
]
