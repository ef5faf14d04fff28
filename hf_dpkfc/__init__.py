"""Private fine-tuning of Hugging Face models with a data-free K-FAC preconditioner."""

from hf_dpkfc.callbacks import DiagnosticsCallback
from hf_dpkfc.config import DPKFCConfig
from hf_dpkfc.curvature.fit import CurvatureOptions, estimate_factors, fit_preconditioner
from hf_dpkfc.curvature.preconditioner import Preconditioner
from hf_dpkfc.curvature.probes import (
    PinkNoiseProbe,
    PublicDataProbe,
    UniformTokenProbe,
    WhiteNoiseProbe,
    ZipfTokenProbe,
)
from hf_dpkfc.curvature.sampled import SampledTokenProbe
from hf_dpkfc.curvature.structured import StructuredTokenProbe
from hf_dpkfc.curvature.words import WordTokenProbe
from hf_dpkfc.layers.routes import inspect_model
from hf_dpkfc.privacy.plan import PrivacyPlan
from hf_dpkfc.trainer import DPKFCTrainer
from hf_dpkfc.tuning import search_space

__all__ = [
    "CurvatureOptions",
    "DPKFCConfig",
    "DPKFCTrainer",
    "DiagnosticsCallback",
    "PinkNoiseProbe",
    "Preconditioner",
    "PrivacyPlan",
    "PublicDataProbe",
    "SampledTokenProbe",
    "StructuredTokenProbe",
    "UniformTokenProbe",
    "WhiteNoiseProbe",
    "WordTokenProbe",
    "ZipfTokenProbe",
    "estimate_factors",
    "fit_preconditioner",
    "inspect_model",
    "search_space",
]
