"""What a run's geometry looks like and what it leaks: spectra, alignment, signal, audit, report.

Everything is computed on probes, free of private data, unless its name says ``unsafe``.
"""

from hf_dpkfc.diagnostics.alignment import align, unsafe_oracle_factors
from hf_dpkfc.diagnostics.lanczos import probe_density, unsafe_density
from hf_dpkfc.diagnostics.signal import probe_signals, unsafe_signals
from hf_dpkfc.diagnostics.spectra import layer_spectra

__all__ = [
    "align",
    "layer_spectra",
    "probe_density",
    "probe_signals",
    "unsafe_density",
    "unsafe_oracle_factors",
    "unsafe_signals",
]
