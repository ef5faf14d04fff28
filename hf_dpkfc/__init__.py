"""Private fine-tuning of Hugging Face models with a data-free K-FAC preconditioner."""

from hf_dpkfc.config import DPKFCConfig
from hf_dpkfc.curvature.fit import CurvatureOptions, fit_preconditioner
from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.curvature.probes import (
    PinkNoiseProbe,
    PublicDataProbe,
    UniformTokenProbe,
    WhiteNoiseProbe,
    ZipfTokenProbe,
)
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.privacy.plan import PrivacyPlan
from hf_dpkfc.trainer import DPKFCTrainer

__all__ = [
    "CurvatureOptions",
    "DPKFCConfig",
    "DPKFCTrainer",
    "PinkNoiseProbe",
    "Preconditioner",
    "PrivacyPlan",
    "PublicDataProbe",
    "UniformTokenProbe",
    "WhiteNoiseProbe",
    "ZipfTokenProbe",
    "fit_preconditioner",
    "inspect_model",
]
