"""The paper's tables and figures: the runs that each needs, their time, and the output."""
