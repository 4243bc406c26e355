"""The collector, its buffer and slots. Pure: the world outside is behind the protocols in ports."""
