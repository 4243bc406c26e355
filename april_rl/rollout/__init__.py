"""The collector, its buffer and slots. Pure: it drives the outside world through the
protocols in ports.
"""
