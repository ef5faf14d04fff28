from __future__ import annotations

import pickle

from hf_dpkfc.errors import LedgerError


def test_errors_cross_processes():
    error = LedgerError("what", why="why", way_out="way out")
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.way_out) == (str(error), "way out")
