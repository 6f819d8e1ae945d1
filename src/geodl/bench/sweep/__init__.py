"""Sweeps: grids and searches of runs, in local processes, on Ray or as SLURM jobs."""
