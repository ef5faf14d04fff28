"""ε and δ: accounting, the frozen plan, the write-ahead ledger. No tensors in here."""
