"""Many runs: grids, one run after the other."""
