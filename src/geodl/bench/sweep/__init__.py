"""Many runs: grids and searches; in local processes, on Ray, as SLURM jobs."""
