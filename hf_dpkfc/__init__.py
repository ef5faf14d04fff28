"""Private fine-tuning of Hugging Face models with a data-free K-FAC preconditioner."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Imported when first asked for (PEP 562): torch and transformers take seconds.
_HOMES = {
    "callbacks": ("DiagnosticsCallback",),
    "config": ("DPKFCConfig",),
    "curvature.fit": ("CurvatureOptions", "estimate_factors", "fit_preconditioner"),
    "curvature.preconditioner": ("Preconditioner",),
    "curvature.probes": (
        "PinkNoiseProbe",
        "PublicDataProbe",
        "UniformTokenProbe",
        "WhiteNoiseProbe",
        "ZipfTokenProbe",
    ),
    "curvature.sampled": ("SampledTokenProbe",),
    "curvature.structured": ("StructuredTokenProbe",),
    "curvature.words": ("WordTokenProbe",),
    "layers.routes": ("inspect_model",),
    "privacy.plan": ("PrivacyPlan",),
    "trainer": ("DPKFCTrainer",),
    "tuning": ("search_space",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # type checkers know the names above, and would take any other for one

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value  # asked once
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
