"""The collector, its buffer, ledger and slots: pure, driven through the protocols in ports."""
