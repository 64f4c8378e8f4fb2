"""Collectives that torch's autograd goes through: :mod:`mpicoll.nn.functional`."""
