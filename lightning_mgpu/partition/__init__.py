"""Turns the forward of an ordinary module into stages: recording, costs, balance, stages."""
