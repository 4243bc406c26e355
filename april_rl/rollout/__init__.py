"""The collector, its buffer, ledger and slots. Pure: it drives the outside world through the
protocols in ports.
"""
