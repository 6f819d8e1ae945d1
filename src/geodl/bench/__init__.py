"""Experiments: runs, sweeps, the tables of the paper, reports."""
