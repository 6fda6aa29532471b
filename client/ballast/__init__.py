"""Ballast from Python: :mod:`ballast.client`."""
